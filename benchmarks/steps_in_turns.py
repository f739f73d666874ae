"""Compares the CPU time of training steps with the peers' in one process, side by side, round by round.

usage: python benchmarks/steps_in_turns.py [--peer FOLDER] [--configurations standard optimised high medium]
       [--batch-size 1] [--rounds 4] [--processes]

Other programs on a machine slow a core down from minute to minute, so that rows in processes of their own differ by
more than the sides do. Here each round makes one step of the peer and one of ours, in alternating order, on one thread,
and gives the ratio of their CPU seconds; the result is the median of the rounds, with the smallest and the largest.
Malloc keeps freed memory for both sides, as a training of ours has it.

`standard` and `optimised` are those of vocoder_vs_openvpi.py, which needs --peer, a checkout of openvpi/SingingVocoders
at 4d0889c; `high` and `medium` those of vits_vs_piper.py, beside the installed piper-tts. These scripts check that both
sides compute the same losses and gradients, and list what differs.

With --processes, each side of a round is a process of its own, as its trainer runs it, which makes two steps that are
not counted and --steps that are: what one side leaves in memory, and how it asks for it, changes nothing for the other.
The result is the same, with page faults and the peak of resident memory. Writes
benchmarks/results/steps_in_turns_DEVICE.json; a configuration and batch size that is measured again replaces the former
result.
"""

import argparse
import json
import logging
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vits_peer
import vits_vs_piper
import vocoder_peer
import vocoder_vs_openvpi

from gputrain.bench import runner, step_bench
from gputrain.hw.plan import decide
from gputrain.hw.probe import machine_facts, probe
from gputrain.hw.runtime import apply
from gputrain.tts.config import TrainTts
from gputrain.vocoder.kind import VocoderWork

Step = Callable[[], object]
VOICES = ("high", "medium")


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    for name in options.configurations:
        if options.side:
            print(json.dumps(alone(name, options)))
            continue
        if options.processes:
            found = in_processes(name, options.rounds)
        else:
            with tempfile.TemporaryDirectory() as folder:
                found = in_turns(*sides_of(name)(name, options, Path(folder)), options.rounds)
        found |= {"configuration": name, "batch_size": options.batch_size, "crop_frames": options.crop_frames}
        if name in VOICES:
            del found["crop_frames"]
            found["seconds"] = options.seconds
        ratio = found["ratio"]
        print(f"{name}, batch {options.batch_size}: ours / peer {ratio['median']:.3f}", ratio, flush=True)
        if options.output_dir:
            write(options.output_dir, found)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="checkout of openvpi/SingingVocoders")
    names = [*vocoder_vs_openvpi.CONFIGURATIONS, *VOICES]
    parser.add_argument("--configurations", choices=names, nargs="+", default=names)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--crop-frames", type=int, default=32, help="length of the vocoder's crops")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of the voice's clips")
    parser.add_argument("--channels", type=int, default=0, help="of the vocoder's generator; the file's")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--processes", action="store_true", help="each side of a round in a process of its own")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of such a process")
    parser.add_argument("--side", choices=("peer", "ours"), help="the side of this process, which --processes starts")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def sides_of(name: str) -> Callable[[str, argparse.Namespace, Path], tuple[Step, Step]]:
    return voice_sides if name in VOICES else vocoder_sides


def vocoder_sides(name: str, options: argparse.Namespace, folder: Path) -> tuple[Step, Step]:
    """Returns a step of SingingVocoders and one of ours, from the same weights on the same sound."""
    changes = {"batch_size": options.batch_size, "crop_mel_frames": options.crop_frames}
    settings = {"configuration": name, "changes": changes, "channels": options.channels, "device": "cpu",
                "peer": str(options.peer), "weights": ""}  # fmt: skip
    train = vocoder_vs_openvpi.training(settings, **vocoder_vs_openvpi.OURS["ours"])
    ours = step_bench.begin_bench(VocoderWork(), train, apply(decide(probe(), train.hardware)), folder)
    task, step, _ = vocoder_vs_openvpi.peer_step(settings, train)
    parts = vocoder_peer.parts_of(task, train.discriminators.discriminators)
    for part, module in vocoder_vs_openvpi.parts_of(ours).items():
        parts[part].load_state_dict(module.state_dict())
    return step, ours.step


def voice_sides(name: str, options: argparse.Namespace, folder: Path) -> tuple[Step, Step]:
    """Returns a step of Piper and one of ours, from the same weights on the same clips."""
    settings = {"configuration": name, "batch_size": options.batch_size, "seconds": options.seconds, "sizes": {},
                "device": "cpu", "peer": str(vits_peer.root_of(None))}  # fmt: skip
    train: TrainTts = vits_vs_piper.training(settings, **step_bench.PLAIN)
    ours = vits_vs_piper.begin(settings, train, apply(decide(probe(), train.hardware)), folder)
    recipe: Any = ours.recipe
    weights = {part: module.state_dict() for part, module in vits_peer.parts_of(recipe).items()}
    task = vits_vs_piper.peer_of(settings, recipe.architecture, weights)
    return vits_peer.stepping(task, vits_peer.batch_for(task, recipe.prepare(ours.loaded, 0))), ours.step


def in_turns(peer: Step, ours: Step, rounds: int) -> dict[str, Any]:
    """Returns the CPU seconds of the steps and the ratio of ours to the peer's. The first three steps of a side
    allocate memory and are not counted."""
    sides, seconds = {"peer": peer, "ours": ours}, dict[str, list[float]](peer=[], ours=[])
    for number in range(-3, rounds):
        for side in sorted(sides, reverse=number % 2 == 0):
            begin = time.process_time()
            sides[side]()
            took = time.process_time() - begin
            if number >= 0:
                seconds[side].append(took)
                print(f"round {number + 1}: {side}: {took:.3f} CPU s", flush=True)
    return compared(seconds)


def alone(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Returns the CPU seconds and the page faults of a step of one side, and the peak of resident memory in GB."""
    with tempfile.TemporaryDirectory() as folder:
        peer, ours = sides_of(name)(name, options, Path(folder))
        step = peer if options.side == "peer" else ours
        del peer, ours
        for _ in range(2):
            step()
        before = resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(options.steps):
            step()
        after = resource.getrusage(resource.RUSAGE_SELF)
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    faults = after.ru_minflt - before.ru_minflt
    return {
        "cpu_seconds": took / options.steps,
        "system_seconds": (after.ru_stime - before.ru_stime) / options.steps,
        "page_faults": faults / options.steps,
        "peak_gb": after.ru_maxrss * 1024 / 1e9,
    }


def in_processes(name: str, rounds: int) -> dict[str, Any]:
    """Returns the results of processes that make steps of one side each, in alternating order."""
    found: dict[str, list[dict[str, float]]] = {"peer": [], "ours": []}
    for number in range(rounds):
        for side in sorted(found, reverse=number % 2 == 0):
            command = [sys.executable, *sys.argv, "--configurations", name, "--side", side]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[side].append(json.loads(output.splitlines()[-1]))
            print(f"round {number + 1}: {side}: {found[side][-1]}", flush=True)
    seconds = {side: [one["cpu_seconds"] for one in runs] for side, runs in found.items()}
    medians = {
        side: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for side, runs in found.items()
    }
    return {**compared(seconds), "processes": medians}


def compared(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the ratios of the rounds, and the medians of the sides."""
    ratios = [one / two for one, two in zip(seconds["ours"], seconds["peer"], strict=True)]
    return {
        "ratio": {"median": statistics.median(ratios), "smallest": min(ratios), "largest": max(ratios)},
        "medians": {side: statistics.median(found) for side, found in seconds.items()},
        "cpu_seconds_of_a_step": seconds,
    }


def write(folder: Path, found: dict[str, Any]) -> None:
    """Writes a result beside those of other configurations and batch sizes."""
    runner.open_folder(folder)
    machine = {key: value for key, value in machine_facts("cpu").items() if key != "threads"}
    path = runner.result_path(folder, "steps_in_turns", str(machine["device"]))
    at = result_key(found)
    earlier = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
    kept = [one for one in earlier if result_key(one) != at]
    here = {"command": runner.command_line("python benchmarks/steps_in_turns.py"), **found}
    runner.write_json(path, {**machine, "threads": 1, "results": [*kept, here]})


def result_key(result: dict[str, Any]) -> tuple[Any, ...]:
    return result["configuration"], result["batch_size"], "processes" in result


if __name__ == "__main__":
    main()
