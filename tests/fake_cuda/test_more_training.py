"""Training on a card that is not there: the combinations that take longer."""

import pytest

from gputrain.hw.plan import Hardware
from tests.fake_cuda import commands
from tests.fake_cuda.device import UNAVAILABLE
from tests.fake_cuda.steps import recogniser, vae, vocoder, voice
from tests.fake_cuda.test_training import (
    ADVERSARY,
    ALL_DISCRIMINATORS,
    AUGMENTED,
    EAGER,
    Case,
    check_command,
    check_steps,
    command,
    counted_elsewhere,
    steps,
    words_of,
)  # fmt: skip

pytestmark = pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)

THOROUGH: dict[str, Case] = {
    "vae, plain layers": (vae(recompute_norms=False, **ADVERSARY), EAGER, 2, 1),
    "vae, fp32": (vae(**ADVERSARY), Hardware(use_torch_compile=False, precision="tf32"), 4, 1),
    "vae, compiled": (vae(**ADVERSARY), Hardware(use_torch_compile=True), 4, 1),
    "vae, decoder": (vae(train_part="decoder", **ADVERSARY), EAGER, 4, 1),
    "vocoder, every discriminator": (vocoder(discriminators=ALL_DISCRIMINATORS), EAGER, 2, 2),
    "vocoder, every discriminator, compiled": (
        vocoder(mini_nsf=True, discriminators=ALL_DISCRIMINATORS, **AUGMENTED, key_aug=True),
        Hardware(use_torch_compile=True), 4, 2,
    ),
    "vocoder, muon, checkpointing": (
        vocoder(discriminator_optimizer="muon", gradient_checkpointing=True), EAGER, 4, 2
    ),
    "recogniser, checkpointing, lora, fp16": (
        recogniser(adapters="lora", gradient_checkpointing=True), Hardware(use_torch_compile=False, precision="fp16"),
        4, 3,
    ),
    "recogniser, adapters": (recogniser(adapters="attention", freeze_encoder_steps=1), EAGER, 4, 3),
    "recogniser, compiled": (recogniser(), Hardware(use_torch_compile=True), 4, 3),
    "voice, fast": (voice(speakers=2, preset="fast"), EAGER, 4, 7),
    "voice, medium": (voice(preset="medium"), EAGER, 2, 7),
    "voice, high, checkpointing": (voice(speakers=3, preset="high", gradient_checkpointing=True), EAGER, 4, 7),
    "voice, compiled": (voice(preset="fast"), Hardware(use_torch_compile=True), 4, 7),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", THOROUGH)
def test_a_step_copies_its_batch_and_nothing_else(name):
    check_steps(steps(THOROUGH[name]), THOROUGH[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train-vocoder", "train-tts"])
def test_a_command_plans(name, tmp_path, photographs):
    check_command(command(name, tmp_path, photographs, True))


@pytest.mark.slow
def test_a_run_that_goes_on_evaluates_and_speaks(tmp_path, photographs):
    """Its checkpoint, on the host, goes back to the card."""
    words = [*words_of("train-vocoder", tmp_path, photographs, False), "--evaluate-every-steps", "1", "--eval-first"]
    with counted_elsewhere():
        for steps_made, further in ((1, []), (2, ["--resume-from", "auto"])):
            ran = commands.train(tmp_path, *words, "--max-steps", steps_made, *further, compiled=True)
            check_command(ran)
    assert [row["step"] for row in ran.metrics if "eval/score" in row] == [0, 1, 2]
