#!/usr/bin/env bash
# Creates .venv next to this file, installs gputrain and the torch build that suits this machine, checks the result and,
# if asked to, runs the demo or the tests. A second run does only what is missing.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: ./setup.sh [--torch auto|cpu|cu126|cu128|cu130] [--dry-run] [demo|test]

Creates .venv next to this script and installs gputrain with torch into it.

  demo         then train, evaluate and export a small VAE (some minutes without a GPU)
  test         install the development tools too, then run the tests
  --torch      the torch build; auto chooses by the NVIDIA driver. Without it a terminal gets a menu, and elsewhere a
               finished .venv keeps its build and a new one gets auto
  --dry-run    print what would be done and change nothing
  --help       print this page

PYTHON=/path/to/python chooses the interpreter (3.10 to 3.14).
TEXT
}

say() { printf 'setup: %s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 2
}

bad_usage() {
    say "$*"
    usage >&2
    exit 2
}

# torch built for CUDA 12.8 ended with 2.11; the other builds continue.
torch_version() {
    case $1 in
        cu128) echo 2.11.0 ;;
        *) echo 2.13.0 ;;
    esac
}

# decide_build DRIVER_CUDA [COMPUTE_CAPABILITY...]: prints the build for a driver that can run CUDA up to DRIVER_CUDA.
# A driver runs every CUDA up to its own, and newer builds know newer cards (an RTX 5090 needs 12.8 or later), so the
# newest possible build is the right one. The exception: builds after 12.6 have no kernels for Pascal and Volta (below
# 7.5), unless a Blackwell card (10.0 and up), for which 12.6 has none, is in the machine too.
decide_build() {
    local cuda=$((${1%.*} * 100 + ${1#*.})) oldest=9999 newest=0 dotted capability
    shift
    for dotted in "$@"; do
        capability=$((${dotted%.*} * 100 + ${dotted#*.}))
        oldest=$((capability < oldest ? capability : oldest))
        newest=$((capability > newest ? capability : newest))
    done
    if ((cuda < 1206)); then
        return 1
    elif ((cuda < 1208 || (oldest < 705 && newest < 1000))); then
        echo cu126
    elif ((cuda < 1300)); then
        echo cu128
    else
        echo cu130
    fi
}

# Prints the build for this machine, from the report of nvidia-smi.
detect_build() {
    local report cuda capability capabilities=()
    if ! command -v nvidia-smi >/dev/null; then
        echo cpu
        return
    fi
    report=$(nvidia-smi 2>/dev/null) || true
    # The newest CUDA that the driver can run; drivers from 610 on write "CUDA UMD Version: 13.3".
    if [[ ! $report =~ CUDA( UMD)?" "Version:" "*([0-9]+\.[0-9]+) ]]; then
        say "nvidia-smi shows no working driver (run it to see why): taking the CPU build"
        echo cpu
        return
    fi
    cuda=${BASH_REMATCH[2]}
    while read -r capability; do
        [[ $capability =~ ^[0-9]+\.[0-9]+$ ]] && capabilities+=("$capability")
    done < <(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null)
    decide_build "$cuda" ${capabilities[@]+"${capabilities[@]}"} ||
        fail "the NVIDIA driver is too old: it runs CUDA $cuda, and torch needs 12.6 or later. Install driver 580 or" \
            "later, or do without the GPU: ./setup.sh --torch cpu"
}

# ask_build DEFAULT: shows the menu and prints the choice; an empty answer or end of input means DEFAULT.
ask_build() {
    local answer
    cat >&2 <<'TEXT'
Which build of torch?
  1) auto: by the NVIDIA driver of this machine
  2) CPU only
  3) CUDA 12.6: older cards (GTX 10, Titan V, V100)
  4) CUDA 12.8: RTX 50 and before
  5) CUDA 13.0: RTX 50 and before, newest driver
TEXT
    while true; do
        read -r -p "Choice [$1]: " answer || echo >&2
        case ${answer:-$1} in
            1 | auto) echo auto ;;
            2 | cpu) echo cpu ;;
            3 | cu126) echo cu126 ;;
            4 | cu128) echo cu128 ;;
            5 | cu130) echo cu130 ;;
            *) say "'$answer' is not on the menu; type 1 to 5" && continue ;;
        esac
        return
    done
}

# Prints the Python that creates the environment: PYTHON if given, otherwise the first suitable one on PATH.
find_python() {
    local candidate version bare="" candidates=(python3.13 python3.12 python3.11 python3.10 python3.14 python3 python)
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        # It is run, because a name on PATH may be a version manager's shim with nothing behind it.
        version=$(python_version "$candidate") || continue
        case $version in 3.1[0-4]) ;; *) continue ;; esac
        if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
        bare=${bare:-$version}
    done
    if [[ -n $bare ]]; then
        fail "Python $bare has no venv module. On Debian and Ubuntu: sudo apt install python$bare-venv"
    elif [[ -n ${PYTHON:-} ]]; then
        fail "PYTHON=$PYTHON is no Python 3.10 to 3.14; unset it, or give the path of one"
    fi
    fail "found no Python 3.10 to 3.14. Install one (Debian and Ubuntu: sudo apt install python3 python3-venv)," \
        "or name it: PYTHON=/path/to/python ./setup.sh"
}

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

pip() { .venv/bin/python -m pip --disable-pip-version-check --no-input -qq "$@"; }

# install_torch BUILD VERSION INDEX. The label (+cu130) requests exactly this build, whichever index pip uses. --no-deps is
# there because torch's index may lack the versions of constraints.txt: installing gputrain fetches them.
install_torch() {
    say "installing torch $2 for $1 (a CUDA build is some gigabytes)"
    pip install --no-deps --timeout 10 --retries 1 --index-url "$3" "torch==$2+$1" 2>/dev/null && return
    say "$3 gave no torch $2: taking it from pip's default index, whose build may not be $1" \
        "(to try again: delete .venv)"
    pip install --no-deps "torch==$2"
}

case $(uname -s) in MINGW* | MSYS* | CYGWIN*) fail "on Windows run setup_windows.bat" ;; esac

torch="" dry_run=no task=""
while (($#)); do
    case $1 in
        --torch)
            (($# > 1)) || bad_usage "--torch needs a value"
            torch=$2
            shift
            ;;
        --torch=*) torch=${1#*=} ;;
        --dry-run) dry_run=yes ;;
        demo | test)
            [[ -z $task ]] || bad_usage "one task at a time, not $task and $1"
            task=$1
            ;;
        -h | --help)
            usage
            exit
            ;;
        *) bad_usage "unknown argument '$1'" ;;
    esac
    shift
done
case $torch in "" | auto | cpu | cu126 | cu128 | cu130) ;; *) bad_usage "unknown build '$torch'" ;; esac

CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
here=$(pwd -P)
# pip catches Ctrl-C and exits with 1, which would start the fallback.
trap 'say "interrupted; run it again to go on"; exit 130' INT

# The stamp names what .venv was made of; without it, .venv is missing, unfinished (the stamp comes last) or broken.
made_for="" made_python="" made_from="" made_tools=""
if [[ -f .venv/setup-stamp ]] &&
    .venv/bin/python -I -c 'import importlib.metadata as m, pip; m.version("torch"); m.version("gputrain")' 2>/dev/null; then
    { read -r made_for && read -r made_python && read -r made_from && read -r made_tools; } <.venv/setup-stamp || true
fi

if [[ -z $torch ]]; then
    torch=${made_for%% *}
    if [[ -t 0 && -z ${CI:-} ]]; then
        torch=$(ask_build "${torch:-1}")
    fi
fi
build=${torch:-auto}
[[ $build != auto ]] || build=$(detect_build)
version=$(torch_version "$build")
index=https://download.pytorch.org/whl/$build
python=$(find_python)

# Another build or interpreter would leave gigabytes of its predecessor behind, and scripts in .venv name the folder they
# were made in: these need a new .venv. Changed requirements only need another run of pip; more tools do no harm.
want_for="$build $version $here"
want_python=$(python_version "$python")
want_from=$(cat pyproject.toml constraints.txt | cksum)
want_tools=$([[ $task == test ]] && echo dev || echo plain)
if [[ $made_for != "$want_for" || (-n ${PYTHON:-} && $made_python != "$want_python") ]]; then
    work=$([[ -e .venv ]] && echo replace || echo make)
elif [[ $made_from != "$want_from" || ($want_tools == dev && $made_tools != dev) ]]; then
    work=update
else
    work=keep
fi

if [[ $dry_run == yes ]]; then
    printf '%-8s%s\n' build: "$build" torch: "$version" index: "$index" python: "$python ($want_python)" \
        venv: "$work $here/.venv" then: "check-compatibility${task:+, $task}"
    exit
fi

if [[ $work == make || $work == replace ]]; then
    say "${work%e}ing .venv with Python $want_python"
    "$python" -m venv --clear .venv || fail "could not $work $here/.venv; see above"
    made_python=$want_python
    install_torch "$build" "$version" "$index"
fi
if [[ $work != keep ]]; then
    rm -f .venv/setup-stamp
    [[ $made_tools != dev ]] || want_tools=dev
    say "installing gputrain at the versions of constraints.txt"
    if [[ $want_tools == dev ]]; then requirement=".[dev]"; else requirement=".[all]"; fi
    pip install -e "$requirement" -c constraints.txt
    printf '%s\n' "$want_for" "$made_python" "$want_from" "$want_tools" >.venv/setup-stamp
fi

say "checking this machine"
checked=0
.venv/bin/gputrain check-compatibility || checked=$?
case $task in
    demo) exec .venv/bin/gputrain demo ;;
    test) exec .venv/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile --durations=20 ;;
esac
((checked == 0)) && say "done; next: source .venv/bin/activate, then gputrain demo"
exit "$checked"
