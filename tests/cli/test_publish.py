"""Model cards of runs, and their upload to a server that answers as the Hub does."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from gputrain.cli.publish import figures_at, model_card, push_to_hub
from gputrain.engine import checkpoint
from gputrain.errors import UserError
from gputrain.kinds import TrainedModel, kinds
from tests.toy import whole_checkpoint

ROWS = [
    {"step": 0, "eval/score": 9.0, "eval/psnr_db": 9.0},
    {"step": 10, "eval/score": 31.5, "eval/psnr_db": 31.5, "eval/ssim": 0.91, "eval/rare": None},
    {"step": 15, "loss/l1": 0.1},
    {"step": 20, "eval/score": 30.0, "eval/psnr_db": 30.0},
]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + '\n{"step": 25, "eval/sc')
    (folder / "config.yaml").write_text(
        "kind: vae\nimage_size: 64\ninit_from: https://ann:secret@x.org/a.pt?token=secret\n"
    )
    return folder


def save_at(run, step: int) -> None:
    checkpoint.save(run, whole_checkpoint(kind="vae", step=step))


def card_of(model, chosen: str = "auto") -> str:
    files = {"files": "config.json", "these factors are": "those of https://ann:secret@x.org/a.pt?token=secret (its)"}
    exported, written = TrainedModel(model=model, checkpoint=chosen), Path("home", "ann", "out")
    hints = [f'Load it: AutoencoderKL.from_pretrained("{written}")']
    return model_card("ann/my-vae", kinds()["vae"], exported, written, files, hints)


def test_a_card_has_the_figures_of_the_exported_checkpoint_the_use_and_the_settings(run):
    assert figures_at(run, 10) == {"score": 31.5, "psnr_db": 31.5, "ssim": 0.91}
    save_at(run, 10)
    checkpoint.keep(run, checkpoint.BEST)
    save_at(run, 20)
    card = card_of(run)
    assert card.startswith("---\nlibrary_name: diffusers\npipeline_tag: image-to-image\n")
    for part in (
        "# my-vae",
        "step 10",
        "| `psnr_db` | 31.5 |",
        "- files: config.json",
        "Image autoencoder, trained with",
        'from_pretrained("ann/my-vae")',
        "those of https://x.org/a.pt (its)",
        "image_size: 64",
        "init_from: https://x.org/a.pt\n",
    ):
        assert part in card, part
    assert "secret" not in card
    for card in (card_of(run, "last"), card_of(run / checkpoint.LAST)):
        assert "step 20" in card
        assert "| `psnr_db` | 30 |" in card
        assert "image_size: 64" in card
    save_at(run, 25)  # A step without an evaluation.
    assert "Held-out" not in card_of(run, "last")
    (run / "export").mkdir()
    assert "Held-out" not in card_of(run / "export")


class Hub(BaseHTTPRequestHandler):
    """Answers the calls of an upload of small files, and keeps what was committed."""

    committed: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(self.path)
        answer: dict[str, object] = {"url": f"http://{self.headers['Host']}/ann/my-vae"}
        if self.headers.get("Authorization") != "Bearer right":
            self.send_response(401)
            self.end_headers()
            return
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            answer = {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]}
        elif "/commit/" in self.path:
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.committed[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            answer = {"success": True, "commitOid": "abc", "commitUrl": f"{answer['url']}/commit/abc"}
        self._send(answer)

    def do_GET(self) -> None:
        self._send({"id": "ann/my-vae", "sha": "abc", "siblings": []})

    def _send(self, answer) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words) -> None:
        pass


@pytest.fixture
def hub(monkeypatch):
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants, utils

    # A connection that was made while the Hub was offline stays offline. Versions before 1.0 have the first name.
    getattr(utils, "reset_sessions" if hasattr(utils, "reset_sessions") else "close_session")()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # It ends within 10 ms.
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", address)
    monkeypatch.setenv("HF_TOKEN", "right")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    Hub.committed, Hub.asked = {}, []
    yield address
    server.shutdown()


def test_an_exported_model_is_uploaded_with_its_card(hub, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert push_to_hub("ann/my-vae", tmp_path, "# my-vae", private=True) == f"{hub}/ann/my-vae"
    assert Hub.committed == {"config.json": b"{}", "README.md": b"# my-vae"}
    assert "/api/repos/create" in Hub.asked[0]


def test_a_wrong_token_is_an_error_of_the_user_and_the_files_stay(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(UserError, match="ann/my-vae: cannot be uploaded") as raised:
        push_to_hub("ann/my-vae", tmp_path, "# my-vae", private=False)
    assert "HF_TOKEN" in raised.value.hint
    assert (tmp_path / "README.md").exists()
