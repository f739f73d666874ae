@echo off
rem Creates .venv next to this file, installs gputrain and the torch build that suits this machine, checks the result
rem and, if asked to, runs the demo or the tests. A second run does only what is missing. setup.sh is the one for Linux.
setlocal EnableExtensions DisableDelayedExpansion
cd /d "%~dp0"
set "TORCH="
set "TASK="
set "DRY_RUN="

:arguments
if "%~1"=="" goto chosen
if "%~1"=="--help" goto help
if "%~1"=="-h" goto help
if "%~1"=="--dry-run" goto dry_run_argument
if "%~1"=="--torch" goto torch_argument
if "%~1"=="demo" goto task_argument
if "%~1"=="test" goto task_argument
>&2 echo setup: unknown argument '%~1'
goto bad_usage
:dry_run_argument
set "DRY_RUN=yes"
shift
goto arguments
:torch_argument
for %%B in (auto cpu cu126 cu128 cu130) do if "%~2"=="%%B" set "TORCH=%%B"
if "%~2"=="" >&2 echo setup: --torch needs a value& goto bad_usage
if not "%~2"=="%TORCH%" >&2 echo setup: unknown build '%~2'& goto bad_usage
shift
shift
goto arguments
:task_argument
if defined TASK >&2 echo setup: one task at a time, not %TASK% and %~1& goto bad_usage
set "TASK=%~1"
shift
goto arguments

rem The stamp names what .venv was made of; without it, .venv is missing, unfinished (the stamp comes last) or broken.
:chosen
set "MADE_BUILD="
set "MADE_TOOLS="
set "MADE_PLACE="
set "STAMP=.venv\setup-stamp.txt"
if not exist "%STAMP%" goto choose_build
.venv\Scripts\python.exe -I -c "import importlib.metadata as m, pip; m.version('torch'); m.version('gputrain')" 2>nul
if not "%ERRORLEVEL%"=="0" goto choose_build
for /f "usebackq tokens=1,2*" %%A in ("%STAMP%") do (
    set "MADE_BUILD=%%A"
    set "MADE_TOOLS=%%B"
    set "MADE_PLACE=%%~C"
)

:choose_build
if defined TORCH goto detect_build
set "TORCH=%MADE_BUILD%"
if not defined CI call :menu
:detect_build
if not defined TORCH set "TORCH=auto"
if not "%TORCH%"=="auto" goto find_python
call :detect
if not "%ERRORLEVEL%"=="0" exit /b 2

:find_python
rem torch built for CUDA 12.8 ended with 2.11; the other builds continue.
set "VERSION=2.13.0"
if "%TORCH%"=="cu128" set "VERSION=2.11.0"
set "INDEX=https://download.pytorch.org/whl/%TORCH%"
set "PY="
if defined PYTHON call :try "%PYTHON%"
if defined PYTHON goto python_tried
for %%V in (3.13 3.12 3.11 3.10 3.14) do call :try py -%%V
call :try python
:python_tried
if defined PY goto plan
>&2 echo setup: found no 64-bit Python 3.10 to 3.14. Install one from python.org, with its launcher py,
>&2 echo setup: or name it: set PYTHON=C:\path\to\python.exe
exit /b 2

rem Another build would leave gigabytes of its predecessor behind, and scripts in .venv name the folder they were made
rem in: these need a new .venv. Changed requirements only need another run of pip; more tools do no harm.
:plan
set "TOOLS=plain"
if "%TASK%"=="test" set "TOOLS=dev"
if "%MADE_TOOLS%"=="dev" if "%MADE_BUILD%"=="%TORCH%" set "TOOLS=dev"
set "WORK=make"
if not "%MADE_BUILD%"=="%TORCH%" goto planned
if not "%MADE_PLACE%"=="%CD%" goto planned
set "WORK=update"
if not "%MADE_TOOLS%"=="%TOOLS%" goto planned
fc /b pyproject.toml .venv\pyproject.toml >nul 2>&1
if not "%ERRORLEVEL%"=="0" goto planned
fc /b constraints.txt .venv\constraints.txt >nul 2>&1
if not "%ERRORLEVEL%"=="0" goto planned
set "WORK=keep"
:planned
if defined DRY_RUN goto dry_run

set "PIP=.venv\Scripts\python.exe -m pip --disable-pip-version-check --no-input -qq"
if "%WORK%"=="keep" goto check
if "%WORK%"=="update" goto install_gputrain
>&2 echo setup: making .venv
%PY% -m venv --clear .venv
if not "%ERRORLEVEL%"=="0" goto failed

rem The label requests exactly this build, whichever index pip uses. --no-deps is there because torch's index may lack
rem the versions of constraints.txt: installing gputrain fetches them.
>&2 echo setup: installing torch %VERSION% for %TORCH%. A CUDA build is some gigabytes.
%PIP% install --no-deps --timeout 10 --retries 1 --index-url %INDEX% torch==%VERSION%+%TORCH% 2>nul
if "%ERRORLEVEL%"=="0" goto install_gputrain
>&2 echo setup: %INDEX% gave no torch %VERSION%: taking it from pip's default index, whose build may not be %TORCH%. To try again, delete .venv.
%PIP% install --no-deps torch==%VERSION%
if not "%ERRORLEVEL%"=="0" goto failed

:install_gputrain
if exist "%STAMP%" del "%STAMP%"
>&2 echo setup: installing gputrain at the versions of constraints.txt
set "REQUIREMENT=.[all]"
if "%TOOLS%"=="dev" set "REQUIREMENT=.[dev]"
%PIP% install -e %REQUIREMENT% -c constraints.txt
if not "%ERRORLEVEL%"=="0" goto failed
copy /y pyproject.toml .venv\pyproject.toml >nul
if not "%ERRORLEVEL%"=="0" goto failed
copy /y constraints.txt .venv\constraints.txt >nul
if not "%ERRORLEVEL%"=="0" goto failed
>"%STAMP%" echo %TORCH% %TOOLS% "%CD%"

:check
>&2 echo setup: checking this machine
.venv\Scripts\gputrain.exe check-compatibility
set "CHECKED=%ERRORLEVEL%"
if "%TASK%"=="demo" goto demo
if "%TASK%"=="test" goto test
if "%CHECKED%"=="0" >&2 echo setup: done; next: .venv\Scripts\activate, then gputrain demo
exit /b %CHECKED%
:demo
.venv\Scripts\gputrain.exe demo
exit /b %ERRORLEVEL%
:test
.venv\Scripts\python.exe -m pytest -n auto --maxprocesses 4 --dist loadfile --durations=20
exit /b %ERRORLEVEL%

:dry_run
echo build:  %TORCH%
echo torch:  %VERSION%
echo index:  %INDEX%
echo python: %PY%
echo venv:   %WORK% "%CD%\.venv"
echo then:   check-compatibility %TASK%
exit /b 0

:failed
>&2 echo setup: failed; the error stands above. Run setup_windows.bat again to go on.
exit /b 1

:bad_usage
call :usage >&2
exit /b 2
:help
call :usage
exit /b 0

:usage
echo usage: setup_windows.bat [--torch auto^|cpu^|cu126^|cu128^|cu130] [--dry-run] [demo^|test]
echo.
echo Creates .venv next to this script and installs gputrain with torch into it.
echo.
echo   demo         then train, evaluate and export a small VAE (some minutes without a GPU)
echo   test         install the development tools too, then run the tests
echo   --torch      the torch build; auto chooses by the NVIDIA driver. Without it there is a menu; where CI is set, a
echo                finished .venv keeps its build and a new one gets auto
echo   --dry-run    print what would be done and change nothing
echo   --help       print this page
echo.
echo set PYTHON=C:\path\to\python.exe chooses the interpreter (3.10 to 3.14, 64 bit).
exit /b 0

rem Sets TORCH by the number that is typed; an empty answer or end of input keeps what is installed, otherwise auto.
:menu
set "DEFAULT=1"
if defined TORCH set "DEFAULT=%TORCH%"
>&2 echo Which build of torch?
>&2 echo   1) auto: by the NVIDIA driver of this machine
>&2 echo   2) CPU only
>&2 echo   3) CUDA 12.6: older cards (GTX 10, Titan V, V100)
>&2 echo   4) CUDA 12.8: RTX 50 and before
>&2 echo   5) CUDA 13.0: RTX 50 and before, newest driver
:ask
set "ANSWER=%DEFAULT%"
set /p "ANSWER=Choice [%DEFAULT%]: "
for %%B in (auto cpu cu126 cu128 cu130) do if "%ANSWER%"=="%%B" set "TORCH=%%B"
if "%ANSWER%"=="%TORCH%" exit /b 0
set "TORCH="
if "%ANSWER%"=="1" set "TORCH=auto"
if "%ANSWER%"=="2" set "TORCH=cpu"
if "%ANSWER%"=="3" set "TORCH=cu126"
if "%ANSWER%"=="4" set "TORCH=cu128"
if "%ANSWER%"=="5" set "TORCH=cu130"
if defined TORCH exit /b 0
>&2 echo setup: '%ANSWER%' is not on the menu; type 1 to 5
goto ask

rem Sets TORCH from the report of nvidia-smi. The newest build that the driver runs is the right one, except that
rem Pascal and Volta (compute capability below 7.5) end with 12.6, unless a Blackwell card (10.0 and up), for which
rem 12.6 has no kernels, is in the machine too. Drivers from 610 on write "CUDA UMD Version: 13.3".
:detect
set "TORCH=cpu"
where nvidia-smi >nul 2>&1
if not "%ERRORLEVEL%"=="0" exit /b 0
set "BANNER="
for /f "delims=" %%L in ('nvidia-smi 2^>nul ^| findstr /c:"CUDA Version:" /c:"CUDA UMD Version:"') do set "BANNER=%%L"
set "DRIVER=0"
if not defined BANNER goto no_driver
set "CUDA=%BANNER:*CUDA =%"
set "CUDA=%CUDA:*Version: =%"
for /f "tokens=1,2 delims=. " %%A in ("%CUDA%") do set /a "DRIVER=%%A * 100 + %%B" 2>nul
:no_driver
if %DRIVER% EQU 0 >&2 echo setup: nvidia-smi shows no working driver; run it to see why. Taking the CPU build.& exit /b 0
if %DRIVER% LSS 1206 goto old_driver
set "OLDEST=9999"
set "NEWEST=0"
for /f "tokens=1,2 delims=. " %%A in ('nvidia-smi --query-gpu^=compute_cap --format^=csv^,noheader 2^>nul') do call :capability %%A %%B
set "TORCH=cu126"
if %DRIVER% LSS 1208 exit /b 0
if %OLDEST% LSS 705 if %NEWEST% LSS 1000 exit /b 0
set "TORCH=cu128"
if %DRIVER% GEQ 1300 set "TORCH=cu130"
exit /b 0
:old_driver
>&2 echo setup: the NVIDIA driver is too old: torch needs one that runs CUDA 12.6 or later. Install driver 580 or later,
>&2 echo setup: or do without the GPU: setup_windows.bat --torch cpu
exit /b 1

:capability
set "CAPABILITY=0"
set /a "CAPABILITY=%1 * 100 + %2" 2>nul
if %CAPABILITY% EQU 0 exit /b 0
if %CAPABILITY% LSS %OLDEST% set "OLDEST=%CAPABILITY%"
if %CAPABILITY% GTR %NEWEST% set "NEWEST=%CAPABILITY%"
exit /b 0

rem Takes the command as PY if it is a suitable Python and there is none yet.
:try
if defined PY exit /b 0
%* -c "import sys; sys.exit(not ((3, 10) <= sys.version_info[:2] <= (3, 14) and sys.maxsize > 2**32))" >nul 2>&1
if not "%ERRORLEVEL%"=="0" exit /b 0
set "PY=%*"
exit /b 0
