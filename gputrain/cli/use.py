"""Commands on trained models, by the kind of the model. Imported once a command runs."""

from collections.abc import Callable
from typing import Any

from gputrain.cli.config import Evaluate, Export, Kind

Progress = Callable[[int, int], None]


def evaluate_model(settings: Evaluate, kind: Kind, progress: Progress) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A title, figures to show, and the report."""
    if kind == "vocoder":
        from gputrain.vocoder import evaluate

        heard = evaluate.evaluate_folder(
            settings.model, settings.data_path, device=settings.device, held_out_share=settings.held_out_share,
            max_clips=settings.max_clips, seconds=settings.clip_seconds, progress=progress,
        )  # fmt: skip
        return f"{settings.model} on {heard.clips} clips", dict(heard.scalars), heard.to_json()
    if kind == "voice":
        from gputrain.tts.evaluate import evaluate_voice

        spoken = evaluate_voice(
            settings.model, settings.data_path, device=settings.device, held_out_share=settings.held_out_share,
            max_clips=settings.max_clips, recogniser=settings.recogniser or "", progress=progress,
        )  # fmt: skip
        return f"{settings.model} on {spoken.clips} clips", dict(spoken.scalars), spoken.to_json()
    from gputrain.vae.evaluate import evaluate_vae

    seen = evaluate_vae(settings, progress)
    return f"{settings.model} on {seen.pictures} pictures", dict(seen.scalars), seen.to_json()


def export_model(settings: Export, format: str, progress: Progress) -> tuple[dict[str, Any], list[str]]:
    """Figures to show, and what to do next."""
    if format == "diffusers":
        from gputrain.vae import export

        figures = export.export_vae(settings, progress)
        return dict(figures), [f'Load it: diffusers.AutoencoderKL.from_pretrained("{settings.output_dir}")']
    import torch

    if format == "piper":
        from gputrain.tts.export import export_piper
        from gputrain.tts.load import load_voice

        voice = load_voice(settings.model, torch.device("cpu"))
        written = export_piper(
            voice, settings.output_dir, settings.name or "voice",
            language_code=settings.language_code, progress=progress,
        )  # fmt: skip
        shown = {"of": voice.source, "files": ", ".join(file.name for file in written.files)}
        return {**shown, "largest difference of a sample": written.largest_difference}, written.notes

    from gputrain.vocoder.export import export_onnx, export_openvpi
    from gputrain.vocoder.load import load

    loaded = load(settings.model, torch.device("cpu"))
    if format == "onnx":
        done = export_onnx(loaded, settings.output_dir, settings.name or "vocoder")
    else:
        done = export_openvpi(loaded, settings.output_dir)
    shown = {"of": loaded.source, "files": ", ".join(file.name for file in done.files)}
    return {**shown, "largest difference of a sample": done.largest_difference}, done.notes
