"""Titles and units of the metrics, and which of them matter most."""

from typing import Literal, NamedTuple

from gputrain.figures import format_number

Better = Literal["higher", "lower", ""]


class MetricStyle(NamedTuple):
    """The title of a metric, its unit ("%": a share of 1), and which direction is better."""

    title: str
    unit: str = ""
    better: Better = ""


# The metrics on held-out data that are also training losses.
TRAINING_LOSSES = {
    "eval/l1": "loss/autoencoder/l1",
    "eval/structural": "loss/autoencoder/structural",
    "eval/mel_distance": "loss/generator/mel",
    "eval/kl": "loss/generator/kl",
    "eval/duration": "loss/generator/duration",
}

STYLES = {
    "score": MetricStyle("score", "", "higher"),
    "psnr_db": MetricStyle("PSNR", "dB", "higher"),
    "ssim": MetricStyle("SSIM", "", "higher"),
    "ms_ssim": MetricStyle("MS-SSIM", "", "higher"),
    "structural": MetricStyle("structural distance", "", "lower"),
    "l1": MetricStyle("L1 distance", "", "lower"),
    "rfid": MetricStyle("rFID", "", "lower"),
    "m_stft": MetricStyle("M-STFT distance", "", "lower"),
    "mel_distance": MetricStyle("mel distance", "", "lower"),
    "mcd_db": MetricStyle("mel-cepstral distortion", "dB", "lower"),
    "mcd_sl_db": MetricStyle("mel-cepstral distortion with length", "dB", "lower"),
    "f0_rmse_cents": MetricStyle("error of the pitch", "cents", "lower"),
    "vuv_f1": MetricStyle("voicing F1", "", "higher"),
    "periodicity_rmse": MetricStyle("periodicity error", "", "lower"),
    "length_mismatch": MetricStyle("length mismatch", "", "lower"),
    "alignment_gain": MetricStyle("alignment gain", "nats a frame", "higher"),
    "pesq": MetricStyle("PESQ", "", "higher"),
    "rtf": MetricStyle("real-time factor", "", "lower"),
    "cer": MetricStyle("character error rate", "%", "lower"),
    "wer": MetricStyle("word error rate", "%", "lower"),
    "mos": MetricStyle("predicted mean opinion score", "", "higher"),
    "blank_share": MetricStyle("share of blanks", "%"),
    "wait_share": MetricStyle("waiting for data", "%", "lower"),
    "peak_share": MetricStyle("share of the device's peak rate", "%", "higher"),
    "tflops": MetricStyle("arithmetic", "TFLOPS", "higher"),
    "seconds_per_step": MetricStyle("time of a step", "s", "lower"),
    "peak_gb": MetricStyle("peak memory of the training", "GB", "lower"),
    "ram_gb": MetricStyle("RAM in use by all programs", "GB"),
    "device_gb": MetricStyle("GPU memory in use by all programs", "GB"),
    "allocated_gb": MetricStyle("memory allocated by torch", "GB"),
    "reserved_gb": MetricStyle("memory reserved by torch", "GB"),
    "free_gb": MetricStyle("free disk space", "GB"),
    "checkpoint_gb": MetricStyle("size of a checkpoint", "GB"),
    "utilisation": MetricStyle("GPU utilisation", "%", "higher"),
    "power_w": MetricStyle("GPU power", "W"),
    "temperature_c": MetricStyle("GPU temperature", "°C"),
    "thermal_throttling": MetricStyle("slowed down by heat", "%", "lower"),
    "learning_rate": MetricStyle("learning rate"),
}


def style_of(name: str) -> MetricStyle:
    """Returns the style of a metric such as eval/psnr_db or loss/generator/mel."""
    group, _, rest = name.partition("/")
    if group in ("loss", "gradient_norm", "statistics", "nonfinite") and rest:
        return MetricStyle(rest.replace("/", ": ").replace("_", " "), "", "lower" if group == "loss" else "")
    last = name.split("/")[-1]
    speakers, _, figure = last.partition("_")
    if speakers in ("new", "old") and figure in STYLES:  # Of a voice with a new speaker.
        style = STYLES[figure]
        return style._replace(title=f"{style.title} of {speakers} speakers")
    if last in STYLES:
        return STYLES[last]
    if last.endswith("_per_second"):
        return MetricStyle(f"{last.removesuffix('_per_second')} a second", "", "higher")
    return MetricStyle(last.replace("_", " "))


def format_value(value: float, unit: str = "") -> str:
    """Returns a value with about three digits and its unit; shares of 1 in percent."""
    if unit == "%":
        return f"{format_number(100 * value)} %"
    return f"{format_number(value)} {unit}".rstrip()
