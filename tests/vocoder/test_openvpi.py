"""openvpi's configuration files: base files, the translation of each key, and refused keys."""

import logging

import pytest
import yaml

from gputrain.cli.settings import PrepareSettings
from gputrain.config import assemble, leaves, read_file
from gputrain.errors import UserError
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.openvpi import PROFILES, known_keys, read_with_bases, translate
from tests.tables import each_row

STANDARD, FAST = PROFILES / "base_hifi_gpu.yaml", PROFILES / "base_hifi_rtx5090_optimized.yaml"
ADAMW, MUON = "torch.optim.AdamW", "modules.optimizer.muon.Muon_AdamW"
# The user's two configurations: key, standard, RTX 5090.
USERS_TABLE = [
    ("task_cls", "nsf_HiFigan_task.nsf_HiFigan", "nsf_HiFigan_fast_task.nsf_HiFigan"),
    ("batch_size", 16, 32),
    ("crop_mel_frames", 48, 80),
    ("model_args.upsample_initial_channel", 512, 1024),
    ("generater_optimizer_args.optimizer_cls", ADAMW, MUON),
    ("discriminate_optimizer_args.optimizer_cls", ADAMW, MUON),
    ("generater_optimizer_args.lr", 0.0001, 0.0003),
    ("discriminate_optimizer_args.lr", 0.0001, 0.0003),
    ("pl_trainer_precision", "32-true", "16-mixed"),
    ("ds_workers", 6, 12),
    ("binarization_args.num_workers", 8, 16),
    ("dataloader_prefetch_factor", 4, 4),
    ("model_args.discriminator_periods", [3, 5, 7, 11, 17, 23, 37], [2, 3, 5, 7, 11, 17, 23]),
    ("model_args.fast_mpd_strides", "absent", [4, 4, 4]),
    ("model_args.fast_mpd_kernel_size", "absent", 11),
    ("model_args.noise_sigma", "absent", 0.0),
    ("val_check_interval", 2000, 1000),
    ("max_updates", 150000, 300000),
    ("log_interval", 100, 100),
    ("num_valid_plots", 100, 32),
    ("clip_grad_norm", None, 1.0),
]


def training(content, tmp_path, name="c.yaml"):
    """Returns the settings of train-vocoder for a file of this content."""
    path = write(tmp_path / name, content)
    return assemble(TrainVocoder, {**translate(read_file(path), path, of="train"), "data_path": "x"}, str(path))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return path


def refusal(content, tmp_path, of="train"):
    path = write(tmp_path / "c.yaml", content)
    with pytest.raises(UserError) as raised:
        translate(read_file(path), path, of=of)
    return raised.value


@pytest.mark.parametrize(("key", "standard", "fast"), USERS_TABLE)
def test_the_files_that_come_along_hold_the_users_values(key, standard, fast):
    for path, expected in ((STANDARD, standard), (FAST, fast)):
        value = read_with_bases(read_file(path), path).values.get(key, "absent")
        assert value == expected
        assert type(value) is type(expected)


def test_what_the_standard_one_becomes(tmp_path):
    made = training(STANDARD.read_text(), tmp_path)
    assert made.discriminators.discriminators == ("msd", "mpd")
    assert made.discriminators.discriminator_periods == (3, 5, 7, 11, 17, 23, 37)
    assert (made.schedule.batch_size, made.data.crop_mel_frames, made.schedule.num_steps) == (16, 48, 150000)
    assert made.model.upsample_initial_channel == 512
    assert made.architecture.resblock_dilation_sizes == ((1, 3, 5),) * 3
    assert not made.model.mini_nsf
    assert (made.schedule.generator_optimizer, made.schedule.discriminator_optimizer) == ("adamw", "adamw")
    assert (made.schedule.learning_rate, made.schedule.discriminator_rate) == (1e-4, 1.0)
    assert (made.schedule.learning_rate_schedule, made.schedule.warmup_steps) == ("constant", 5000)
    assert (made.schedule.min_learning_rate, made.schedule.gradient_clip) == (1e-5, 0.0)
    assert (made.schedule.beta1, made.schedule.beta2, made.schedule.seed) == (0.8, 0.99, 114514)
    assert (made.hardware.precision, made.hardware.device) == ("tf32", "auto")
    assert (made.hardware.num_workers, made.hardware.prefetch_factor) == (6, 4)
    assert (made.saving.evaluate_every_steps, made.saving.log_every_steps, made.saving.num_valid_plots) == (
        2000,
        100,
        100,
    )
    assert (made.saving.keep_checkpoints, made.saving.permanent_start, made.saving.permanent_interval) == (
        5, 200000, 40000
    )  # fmt: skip
    assert made.loss_mel.fmax == 22050
    assert made.model.init_from is None
    assert (made.data.val_num, made.data.held_out_share) == (0, 0.05)
    assert made.saving.eval_first is None


def test_what_the_one_for_the_rtx_5090_becomes(tmp_path, caplog):
    made = training(FAST.read_text(), tmp_path)
    assert made.discriminators.discriminators == ("fast_mrd", "fast_mpd")
    assert made.discriminators.discriminator_periods == (2, 3, 5, 7, 11, 17, 23)
    assert made.discriminators.fast_mpd_strides == (4, 4, 4)
    assert made.discriminators.fast_mpd_kernel_size == 11
    assert (made.schedule.batch_size, made.data.crop_mel_frames, made.schedule.num_steps) == (32, 80, 300000)
    assert (made.model.upsample_initial_channel, made.model.noise_sigma) == (1024, 0.0)
    assert (made.schedule.generator_optimizer, made.schedule.discriminator_optimizer) == ("muon", "muon")
    assert (made.schedule.learning_rate, made.schedule.discriminator_rate) == (3e-4, 1.0)
    assert (made.schedule.weight_decay, made.schedule.discriminator_weight_decay) == (0.01, 0.1)
    assert made.hardware.precision == "fp16"
    assert (made.hardware.num_workers, made.hardware.prefetch_factor) == (12, 4)
    assert (made.saving.evaluate_every_steps, made.saving.log_every_steps, made.saving.num_valid_plots) == (
        1000,
        100,
        32,
    )
    assert made.schedule.gradient_clip == 1.0
    assert not caplog.records  # Every key has an effect.


@pytest.mark.parametrize(("path", "workers"), [(STANDARD, 8), (FAST, 16)])
def test_the_same_file_prepares_the_data(path, workers):
    made = translate(read_file(path), path, of="prepare")
    prepared = assemble(PrepareSettings, {**made, "input_dir": "in", "output_dir": "out"})
    assert (prepared.kind, prepared.num_workers) == ("vocoder", workers)
    assert (prepared.sound.f0_method, prepared.sound.f0_min, prepared.sound.f0_max) == ("parselmouth", 65, 1100)
    assert (prepared.sound.audio_sample_rate, prepared.sound.hop_size) == (44100, 512)


def like_openvpis(folder):
    """A checkout's configs in brief: a base, a standard one over it, and the fast and the fine-tuning one over that."""
    block = {"optimizer_cls": ADAMW, "lr": 0.0001, "beta1": 0.8, "beta2": 0.99, "weight_decay": 0}
    write(folder / "configs/base.yaml", {"data_input_path": [], "val_num": 1, "pe": "parselmouth", "f0_min": 65,
          "aug_num": 1, "key_aug": False})  # fmt: skip
    write(folder / "configs/base_hifi.yaml", {
        "base_config": ["configs/base.yaml"], "task_cls": "training.nsf_HiFigan_task.nsf_HiFigan",
        "raw_data_dir": [], "binary_data_dir": None, "DataIndexPath": "data", "fmax_for_loss": None,
        "crop_mel_frames": 20, "batch_size": 3, "max_updates": 100000, "clip_grad_norm": None,
        "model_args": {"mini_nsf": False, "discriminator_periods": [3, 5, 7, 11, 17, 23, 37], "resblock": "1"},
        "generater_optimizer_args": block, "discriminate_optimizer_args": block, "finetune_enabled": False,
        "finetune_ckpt_path": None, "freezing_enabled": False, "frozen_params": [], "pl_trainer_precision": "32-true",
        "pl_trainer_devices": "auto", "pl_trainer_strategy": {"name": "auto", "find_unused_parameters": True},
        "lr_scheduler_args": {"scheduler_cls": "lr_scheduler.scheduler.WarmupLR", "warmup_steps": 5000,
                              "min_lr": 0.00001},
    })  # fmt: skip
    muon = {"optimizer_cls": MUON, "lr": 0.0002, "adamw_args": {"weight_decay": 0.0}, "verbose": False}
    write(folder / "configs/nsf_hifigan_fast.yaml", {
        "base_config": ["configs/base_hifi.yaml"], "task_cls": "training.nsf_HiFigan_fast_task.nsf_HiFigan",
        "crop_mel_frames": 48, "clip_grad_norm": 1, "sampler_frame_count_grid": 6, "finetune_ckpt_path": "",
        "model_args": {"mini_nsf": True, "noise_sigma": 0.01, "discriminator_periods": [2, 3, 5, 7, 11]},
        "generater_optimizer_args": {**muon, "muon_args": {"weight_decay": 0.01}},
        "discriminate_optimizer_args": {**muon, "muon_args": {"weight_decay": 0.1}},
        "pl_trainer_precision": "16-mixed", "use_stftloss": True,
    })  # fmt: skip
    write(folder / "configs/ft_hifigan.yaml", {
        "base_config": "configs/base_hifi.yaml", "finetune_enabled": True, "finetune_ckpt_path": "good.ckpt",
        "pc_aug": True, "pc_aug_key": 12, "model_args": {"mini_nsf": True}, "crop_mel_frames": 32,
        "generater_optimizer_args": {"lr": 0.00001}, "discriminate_optimizer_args": {"lr": 0.00001},
    })  # fmt: skip
    return folder / "configs"


def test_files_like_openvpis_own(tmp_path, caplog):
    configs = like_openvpis(tmp_path / "checkout")
    standard = training((configs / "base_hifi.yaml").read_text(), configs)
    assert not standard.losses.use_stftloss  # openvpi's default; ours is True.
    assert (standard.data.val_num, standard.schedule.batch_size, standard.data.crop_mel_frames) == (1, 3, 20)
    assert standard.discriminators.discriminators == ("msd", "mpd")
    assert not caplog.records
    fast = training((configs / "nsf_hifigan_fast.yaml").read_text(), configs)
    assert (fast.schedule.batch_size, fast.data.crop_mel_frames, fast.data.val_num) == (3, 48, 1)
    assert (fast.schedule.learning_rate, fast.schedule.discriminator_rate) == (2e-4, 1.0)
    assert (fast.schedule.weight_decay, fast.schedule.discriminator_weight_decay) == (0.01, 0.1)
    assert (fast.model.mini_nsf, fast.model.noise_sigma, fast.losses.use_stftloss) == (True, 0.01, True)
    assert ["sampler_frame_count_grid has no effect" in record.getMessage() for record in caplog.records] == [True]
    tuned = training((configs / "ft_hifigan.yaml").read_text(), configs)
    assert tuned.model.init_from == "good.ckpt"
    assert (tuned.schedule.learning_rate, tuned.schedule.min_learning_rate) == (1e-5, 1e-5)
    assert (tuned.losses.pc_aug, tuned.losses.pc_aug_key) == (True, 12)


def test_a_file_over_one_that_comes_along(tmp_path):
    """Keys outside of a block override the base's block, and the guide's spellings are accepted."""
    made = training(
        {
            "base_config": [FAST.name], "lr": 0.0001, "optimizer_cls": ADAMW, "num_steps": 500,
            "upsample_initial_channel": 768, "binarization_args.num_workers": 3, "ds_workers": 2, "use_bf16": True,
            "clip_grad_norm": 0.5,
        },
        tmp_path,
    )  # fmt: skip
    assert (made.schedule.learning_rate, made.schedule.discriminator_rate) == (1e-4, 1.0)
    assert (made.schedule.generator_optimizer, made.schedule.discriminator_optimizer) == ("adamw", "adamw")
    assert (made.schedule.weight_decay, made.schedule.discriminator_weight_decay) == (0.0, 0.0)  # The value was Muon's.
    assert (made.schedule.num_steps, made.schedule.gradient_clip) == (500, 0.5)
    assert (made.model.upsample_initial_channel, made.hardware.num_workers) == (768, 2)
    assert made.hardware.precision == "bf16"
    path = tmp_path / "c.yaml"
    assert translate(read_file(path), path, of="prepare")["num_workers"] == 3


@each_row("", "mine", "configs", "configs/mine/songs")
def test_where_bases_are_looked_for(tmp_path, place):
    configs = like_openvpis(tmp_path)
    content = {"base_config": ["configs/base_hifi.yaml"], "batch_size": 7}
    made = training(content, configs.parent / place, "own.yaml")
    assert (made.schedule.batch_size, made.data.crop_mel_frames) == (7, 20)


def test_bases_of_our_keys_alone(tmp_path):
    write(tmp_path / "base.yaml", {"crop_mel_frames": 40, "batch_size": 9})
    made = training({"base_config": "base.yaml", "batch_size": 7}, tmp_path)
    assert (made.schedule.batch_size, made.data.crop_mel_frames) == (7, 40)


def test_a_file_goes_before_its_base_for_the_command_that_it_means(tmp_path):
    block = {"beta1": 0.8}
    base = {"pe": "harvest", "binarization_args": {"num_workers": 8}, "discriminate_optimizer_args": block}
    write(tmp_path / "base.yaml", base)
    path = write(tmp_path / "c.yaml", {"base_config": "base.yaml", "ds_workers": 2, "f0_method": "swift-f0"})
    made = translate(read_file(path), path, of="prepare")
    assert made == {"kind": "vocoder", "num_workers": 8, "f0_method": "swift-f0"}
    made = training({"base_config": "base.yaml", "generater_optimizer_args": {"beta1": 0.9}}, tmp_path).schedule
    assert (made.betas, made.discriminator_betas) == ((0.9, 0.99), (0.8, 0.99))
    made = training({"base_config": "base.yaml", "beta1": 0.9}, tmp_path).schedule
    assert (made.betas, made.discriminator_betas) == ((0.9, 0.99), (0.8, 0.99))


@each_row(
    ({"pl_trainer_precision": "bf16"}, {"precision": "bf16"}),
    (  # Keys that files of former versions have, which their code did not read, or which concern several GPUs.
        {"pl_trainer_strategy": "auto", "ddp_backend": "nccl_no_p2p", "optimizer_args": {"lr": 1}, "sort_by_len": True,
         "shuff_val": True, "num_val": 5, "test_prefixes": [], "use_midi_loss": True, "use_bound_loss": True,
         "binarizer_cls": "preprocessing.BaseBinarizer", "pe": "rmvpe", "pe_ckpt": "model.pt", "add_watermark": False,
         "lambda_wm": 1, "model_args": {"fast_mpd_glu_decay": 0.1}},
        {},
    ),
    ({"pl_trainer_strategy": {"find_unused_parameters": False, "name": "auto"}}, {}),
    ({"pl_trainer_strategy": None, "pc_aug_prob": 0.25}, {"pc_aug_rate": 0.25}),
    ({"pl_trainer_precision": "bf16-mixed"}, {"precision": "bf16"}),
    ({"pl_trainer_accelerator": "gpu"}, {"device": "cuda"}),
    ({"num_sanity_val_steps": 0}, {"eval_first": False}),
    ({"num_sanity_val_steps": 2, "nccl_p2p": True}, {}),
    ({"pl_trainer_accelerator": "cpu", "pl_trainer_devices": 1}, {"device": "cpu"}),
    ("clip_grad_norm: off", {"gradient_clip": 0.0}),
    ({"clip_grad_norm": 0.5}, {"gradient_clip": 0.5}),
    ({"lab_aux_loss": 30}, {"lab_aux_melloss": 30.0}),
    ({"aux_step": None}, {"discriminator_start": 0}),
    ({"num_ckpt_keep": -1}, {"keep_checkpoints": 0}),
    ({"finetune_enabled": False, "finetune_ckpt_path": "x.ckpt"}, {}),
    ({"finetune_ckpt_path": "x.ckpt"}, {"init_from": "x.ckpt"}),
    (
        {"finetune_ignored_params": None, "frozen_params": None, "nccl_p2p": True},
        {"finetune_ignored_params": ()},
    ),
    ({"model_args": {"resblock_dilation_sizes": [[1, 2], [3]]}}, {"resblock_dilation_sizes": "1,2;3"}),
    (
        {"model_args": {"fast_mpd_periods": [2, 3], "discriminator_periods": [5]}},
        {"discriminator_periods": (2, 3)},
    ),
    (
        {
            "task_cls": "nsf_HiFigan_task.nsf_HiFigan",
            "model_args": {"fast_mpd_periods": [2, 3], "discriminator_periods": [5]},
        },
        {"discriminators": ("msd", "mpd"), "discriminator_periods": (5,)},
    ),
    (
        {"optimizer_cls": MUON, "generater_optimizer_args": {"muon_args": {"weight_decay": 0.1}}},
        {"generator_optimizer": "muon", "discriminator_optimizer": "muon", "weight_decay": 0.1},
    ),
    (
        {"optimizer_cls": MUON, "generater_optimizer_args": {"weight_decay": 0.1, "adamw_args.weight_decay": 0}},
        {"generator_optimizer": "muon", "discriminator_optimizer": "muon", "weight_decay": 0.1},
    ),
    (  # Used by Muon only.
        {"generater_optimizer_args": {"optimizer_cls": ADAMW, "adamw_args": {"weight_decay": 0.1}}},
        {"generator_optimizer": "adamw"},
    ),
    (
        {"generater_optimizer_args": {"lr": 1e-4}, "discriminate_optimizer_args": {"lr": 2e-4}},
        {"learning_rate": 1e-4, "discriminator_learning_rate": 2e-4},
    ),
    (
        {
            "generater_optimizer_args": {"lr": 1e-4, "beta1": 0.8, "beta2": 0.99},
            "discriminate_optimizer_args": {"lr": 1e-4, "beta1": 0.5, "beta2": 0.99},
        },
        {"learning_rate": 1e-4, "beta1": 0.8, "beta2": 0.99, "discriminator_beta1": 0.5},
    ),
    (
        {"generater_optimizer_args": {"weight_decay": 0.2, "muon_args": {"weight_decay": 0.1}}, "ds_workers": 1},
        {"weight_decay": 0.2, "num_workers": 1},
    ),
)  # fmt: skip
def test_what_keys_become(tmp_path, content, options):
    path = write(tmp_path / "c.yaml", content)
    assert translate(read_file(path), path, of="train") == {"use_stftloss": False, **options}


def test_paths_of_their_preparation_are_passed_over_aloud(tmp_path, caplog):
    path = write(tmp_path / "c.yaml", {"data_input_path": ["songs"], "DataIndexPath": "data", "pe": "harvest"})
    with caplog.at_level(logging.INFO):
        assert translate(read_file(path), path, of="prepare") == {"kind": "vocoder", "f0_method": "pyworld"}
    (record,) = caplog.records
    named = f"{path}: data_input_path and DataIndexPath have no effect: prepare-data has --input-dir"
    assert named in record.getMessage()


def test_their_preparation_of_another_model_or_version(tmp_path):
    content = {"pe": "rmvpe", "binarizer_cls": "x.Y", "pl_trainer_strategy": "auto", "model_args": {"lvc_kernels": 3}}
    path = write(tmp_path / "c.yaml", content)
    assert translate(read_file(path), path, of="prepare") == {"kind": "vocoder", "f0_method": "auto"}


def test_frozen_parameters_and_the_one_step_task(tmp_path):
    freezes = {"freezing_enabled": True, "frozen_params": ["discriminator.mpd"], "ds_workers": 1}
    path = tmp_path / "ft.yaml"
    assert translate(freezes, path, of="train")["frozen_params"] == ("discriminator.mpd",)
    assert "frozen_params" not in translate({**freezes, "freezing_enabled": False}, path, of="train")
    one_step = {"task_cls": "training.nsf_HiFigan_task_one_step_gan.nsf_HiFigan", "gan_d_scale": 1}
    found = translate(one_step, path, of="train")
    assert found == {"discriminators": ("msd", "mpd"), "use_stftloss": False}


@each_row(
    ({"task_cls": "training.univnet.univnet_task"}, "task_cls is 'training.univnet.univnet_task'", "nsf_HiFigan"),
    ({"pl_trainer_precision": "16-true"}, "pl_trainer_precision is '16-true'", "16-mixed"),
    ({"pl_trainer_devices": 2}, "pl_trainer_devices is 2: training runs in one process", "CUDA_VISIBLE_DEVICES"),
    ({"pl_trainer_strategy": "ddp"}, "pl_trainer_strategy is 'ddp': training runs in one process", "auto"),
    ({"add_watermark": True, "ds_workers": 1}, "add_watermark is True: no watermark is trained", "set it to false"),
    ({"pl_trainer_strategy": {"name": "ddp"}}, "pl_trainer_strategy.name is 'ddp': training runs in one", "auto"),
    ({"nccl_p2p": False}, "nccl_p2p is False: training runs in one process", "leave it out"),
    ({"num_sanity_val_steps": "all"}, "num_sanity_val_steps is 'all': expected a number", "0 to start without"),
    ({"aug_num": 2}, "aug_num is 2: no code of openvpi's reads it", "leave it out"),
    ({"sampler_frame_count_grid": 200}, "sampler_frame_count_grid is 200: no code", "leave it out"),
    ({"freezing_enabled": True}, "freezing_enabled is True: frozen_params names nothing", "or set it to false"),
    ({"freezing_enabled": 1, "ds_workers": 1}, "freezing_enabled is 1: expected true or false", ""),
    ({"gan_d_scale": 2, "ds_workers": 1}, "gan_d_scale is 2: the steps of AdamW", "leave it out"),
    ({"finetune_enabled": True, "finetune_ckpt_path": ""}, "finetune_ckpt_path names no file", "name the check"),
    ({"max_updates": None}, "max_updates is null", "leave the key out"),
    ({"model_args": {"mini_nsf": None}}, "model_args.mini_nsf is null", "leave the key out"),
    ({"model_args": {"mini_nfs": True}}, "unknown key 'model_args.mini_nfs'", "'model_args.mini_nsf'"),
    ({"pl_trainer_precison": "32", "ds_workers": 1}, "unknown key 'pl_trainer_precison'", "'pl_trainer_precision'"),
    ({"modle_args": {"mini_nsf": True}, "ds_workers": 1}, "unknown key 'modle_args'", "'model_args'"),
    ({"model_args": 3}, "model_args is 3, expected keys and values", "indent"),
    ({"model_args": None}, "model_args is null, expected keys and values", "indent"),
    ({"model_args": {"resblock": 1}}, "model_args.resblock is 1: only kind", "quotation marks"),
    ({"model_args": {"resblock_dilation_sizes": [1, 3]}}, "expected a list of lists", "such as"),
    ({"generater_optimizer_args": {"lr": "fast"}}, "generater_optimizer_args.lr is 'fast', expected a number", ""),
    ({"ds_workers": 4, "batch_size": 0}, "batch_size is 0, expected at least 1", ""),
    ({"ds_workers": 4, "num_workers": 8}, "ds_workers is 4 and num_workers is 8: both set num_workers", "keep one"),
    ({"lr": 1e-4, "generater_optimizer_args": {"lr": 2e-4}}, "and generater_optimizer_args.lr is", "keep"),
    ({"lr": 1e-4, "discriminate_optimizer_args": {"lr": 2e-4}}, "both set discriminator_learning_rate", "keep"),
    ({"generater_optimizer_args": {"optimizer_cls": "torch.optim.SGD"}}, "only AdamW and Muon", "one of"),
    (
        {"generater_optimizer_args": {"optimizer_cls": MUON, "adamw_args": {"weight_decay": 0.1}}},
        "generater_optimizer_args.adamw_args.weight_decay is 0.1: parameters of AdamW have no decay",
        "set it to 0",
    ),
    ({"generater_optimizer_args": {"optimizer_cls": MUON, "weight_decay": 0.1}}, "have no decay", "muon_args"),
    ({"lr_scheduler_args": {"scheduler_cls": "torch.optim.lr_scheduler.StepLR"}}, "after a warm-up", "WarmupLR"),
    (
        {"binarization_args": {"num_workers": 8}, "binarization_args.num_workers": 16},
        "binarization_args.num_workers occurs twice",
        "keep one",
    ),
    ({"base_config": ["configs/gone.yaml"]}, "base_config configs/gone.yaml does not exist", "every key has a def"),
    ({"base_config": ["c.yaml"]}, "base_config c.yaml refers back to this file", "let only one"),
    ({"base_config": 3}, "base_config is 3, expected a list of paths", ""),
    ({"num_ckpt_keep": 0}, "no checkpoint would be kept", "-1 keeps all"),
)  # fmt: skip
def test_what_is_refused(tmp_path, content, message, hint):
    error = refusal(content, tmp_path)
    assert error.message.startswith(f"{tmp_path / 'c.yaml'}: ")
    assert message in error.message
    assert hint in error.hint


def test_all_refusals_come_at_once(tmp_path):
    write(tmp_path / "base.yaml", {"gan_d_scale": 3})
    content = {"base_config": ["base.yaml"], "pl_trainer_devices": 4, "batch_size": "many", "max_updates": None}
    first, *lines = refusal(content, tmp_path).message.splitlines()
    assert first == f"{tmp_path / 'c.yaml'}: 4 keys cannot be translated"
    assert [line.split(" is ")[0].strip() for line in lines] == [
        f"{tmp_path / 'base.yaml'}: gan_d_scale", "pl_trainer_devices", "batch_size", "max_updates"
    ]  # fmt: skip
    assert "CUDA_VISIBLE_DEVICES" in lines[1]
    assert "expected a whole number" in lines[2]


def test_circles_are_found_at_any_length(tmp_path):
    for name, base in (("a", "b"), ("b", "c"), ("c", "a")):
        write(tmp_path / f"{name}.yaml", {"base_config": [f"{base}.yaml"]})
    with pytest.raises(UserError, match=r"c.yaml: base_config a.yaml refers back"):
        translate(read_file(tmp_path / "a.yaml"), tmp_path / "a.yaml", of="train")


def test_keys_of_the_other_command(tmp_path):
    """They are ignored in a file with openvpi's keys; in other files they stay, and the command refuses them."""
    theirs = {"ds_workers": 4, "trim_db": 40, "batch_size": 8, "max_updates": None}
    path = tmp_path / "c.yaml"
    assert translate(theirs, path, of="prepare") == {"kind": "vocoder", "trim_db": 40.0}
    assert translate({**theirs, "max_updates": 5}, path, of="train") == {
        "num_workers": 4, "batch_size": 8, "num_steps": 5, "use_stftloss": False
    }  # fmt: skip
    ours = {"batch_size": 8, "trim_db": 40, "f0_min": 50, "image_size": 9}
    for command in ("prepare", "train"):
        assert translate(ours, path, of=command) == ours
    assert refusal({"binarization_args": {"num_wokers": 3}}, tmp_path, "prepare").hint.endswith("num_workers'?")


def test_every_option_in_the_table_exists():
    known = leaves(TrainVocoder).keys() | leaves(PrepareSettings).keys()
    for key in known_keys().values():
        assert set(key.options) <= known, key.name
    assert len(known_keys()) > 100
