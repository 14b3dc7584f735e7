"""Tokenizers: what a text becomes, what their files decide, and where they come from."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from shardwright.train.data.sources.items import cut
from shardwright.train.data.tokens.tokenizers import Bytes, FromFile, Tokenizer, open_tokenizer
from shardwright.train.errors import UserError
from tests.train.data.samples import CHATML, save_tokenizer, texts

TEXT = "Grüße, 世界 \U0001f600\x00\n\n  def f():\n\treturn  1\n"


@pytest.fixture(params=["bytes", "pieces"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> FromFile:
    return FromFile(save_tokenizer(tmp_path, request.param) / "tokenizer.json")


def test_bytes_are_the_default_and_lose_nothing() -> None:
    tokenizer = open_tokenizer("bytes")
    assert isinstance(tokenizer, Bytes)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert (tokenizer.vocab_size, tokenizer.end, tokenizer.chat_template, tokenizer.file) == (
        256,
        None,
        None,
        None,
    )
    assert tokenizer.decode([104, 105, 0xFF, 100_000]) == "hi\ufffd\ufffd"
    ids, places = tokenizer.encode_places("aé")
    assert ids == [97, 195, 169] and places == [(0, 1), (1, 2), (1, 2)]


def test_a_file_gives_the_ids_of_its_own_library(tmp_path: Path, opened: FromFile) -> None:
    library = pytest.importorskip("tokenizers").Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    for text in (*texts(6), TEXT, "", " x", "a<|im_end|>\n<|im_start|>b"):
        assert opened.encode(text) == library.encode(text, add_special_tokens=False).ids
        assert opened.encode_batch([text, "b"])[0] == opened.encode(text) == opened.encode_places(text)[0]
    assert opened.vocab_size == library.get_vocab_size()
    assert pickle.loads(pickle.dumps(opened)).encode(TEXT) == opened.encode(TEXT)


def test_settings_of_the_file_do_not_cut_or_fill_texts(tmp_path: Path) -> None:
    tokenizer = FromFile(save_tokenizer(tmp_path) / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode(texts(1)[0])) == texts(1)[0]
    assert len(tokenizer.encode("x")) == 1


@pytest.mark.parametrize(
    ("ids", "ends"), [(None, (0,)), (0, (0,)), (5, (0, 5)), ([7, 0, 5], (7, 0, 5)), ([7, True, -1, 10**6], (0, 7))]
)  # fmt: skip
def test_ends_of_the_generation_settings(tmp_path: Path, ids: object, ends: tuple[int, ...]) -> None:
    """A list keeps its order. Ids that the vocabulary does not have are left out."""
    save_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tokenizer = open_tokenizer(str(tmp_path))
    assert (tokenizer.end, tokenizer.ends) == (0, ends)
    assert open_tokenizer("bytes").ends == ()


def test_special_tokens_are_known(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "a")
    tokenizer = open_tokenizer(str(tmp_path / "a"))
    assert tokenizer.encode("<|endoftext|><|bos|>") == [tokenizer.end, tokenizer.begin] == [0, 1]
    assert {0, 1, 2, 3} < tokenizer.special and len(tokenizer.special) == 13
    assert tokenizer.names == {"eos_token": "<|endoftext|>", "bos_token": "<|bos|>"}
    assert tokenizer.file == tmp_path / "a" / "tokenizer.json"
    # Without a post-processor that adds it, a text does not begin with bos_token.
    assert open_tokenizer(str(save_tokenizer(tmp_path / "b", "pieces"))).begin is None
    (tmp_path / "b" / "tokenizer_config.json").unlink()
    bare = open_tokenizer(str(tmp_path / "b"))
    assert bare.end == 0 and bare.names == {}
    (tmp_path / "b" / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert open_tokenizer(str(tmp_path / "b")).end == bare.encode("</s>")[-1] != 0


def test_the_chat_template_comes_from_its_file_or_the_configuration(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    folder = save_tokenizer(tmp_path)
    assert open_tokenizer(str(folder)).chat_template is None
    save_tokenizer(folder, chat_template=several)
    assert open_tokenizer(str(folder)).chat_template == "y"
    save_tokenizer(folder, chat_template="z")
    assert open_tokenizer(str(folder)).chat_template == "z"
    (folder / "chat_template.jinja").write_text(CHATML)
    assert open_tokenizer(str(folder)).chat_template == CHATML


def test_fingerprints_change_with_what_decides_the_ids(tmp_path: Path) -> None:
    one, other = save_tokenizer(tmp_path / "one"), save_tokenizer(tmp_path / "other")
    first = open_tokenizer(str(one)).fingerprint
    assert (
        first
        == open_tokenizer(str(other)).fingerprint
        == open_tokenizer(str(one / "tokenizer.json")).fingerprint
    )
    save_tokenizer(other, eos_token="</s>")
    assert open_tokenizer(str(other)).fingerprint != first
    save_tokenizer(other, "pieces")
    assert len({first, open_tokenizer(str(other)).fingerprint, Bytes().fingerprint}) == 3


def parts_of(text: str, length: int) -> Iterator[tuple[str, str, str]]:
    """Parts of about this length, with the 256 characters on both sides."""
    start = 0
    while start < len(text):
        stop = min(start + length, len(text))
        stop = len(text) if stop == len(text) else stop - 1 + (cut(text[stop - 1 : stop + 200]) or 1)
        yield text[start:stop], text[max(0, start - 256) : start], text[stop : stop + 256]
        start = stop


@pytest.mark.parametrize("length", [300, 1000, 4000])
def test_parts_of_a_long_text_have_the_tokens_of_the_whole(opened: FromFile, length: int) -> None:
    text = "\n\n".join(texts(12))
    pieces = list(parts_of(text, length))
    assert len(pieces) >= 5
    ids = [number for part in pieces for number in opened.encode_part(*part)]
    assert ids == opened.encode(text)


def test_the_text_after_a_part_decides_its_last_tokens(tmp_path: Path) -> None:
    tokenizer = FromFile(save_tokenizer(tmp_path) / "tokenizer.json")
    whole, end = tokenizer.encode("end\n\nHi"), tokenizer.encode("Hi")
    assert tokenizer.encode("end\n\n") != whole[: -len(end)]
    assert list(tokenizer.encode_part("end\n\n", before="", after="Hi")) == whole[: -len(end)]


@pytest.mark.parametrize("text", ["x" * 5000, "\n" * 5000, "世" * 3000, " " * 4000, "a  \n\n " * 900])
def test_parts_without_a_good_place_between_lose_nothing(opened: FromFile, text: str) -> None:
    ids = [number for part in parts_of(text, 1000) for number in opened.encode_part(*part)]
    if opened.begin is not None:  # the other tokenizer has no tokens for some of these characters
        assert opened.decode(ids) == text
    assert opened.encode_part(text, "", "") == opened.encode(text)


def test_a_text_that_goes_on_inside_a_line_gets_no_blank_before_it(tmp_path: Path) -> None:
    tokenizer = FromFile(save_tokenizer(tmp_path, "pieces") / "tokenizer.json")
    start = tokenizer.encode("the")
    inside, places = tokenizer.encode_places("the", inside=True)
    assert tokenizer.decode(inside) == "the" and inside != start
    assert places[0][0] == 0 and places[-1][1] == 3
    assert [*tokenizer.encode("a-"), *inside] == tokenizer.encode("a-the")


# ------------------------------------------------------------------------------
# What is refused


def damaged(folder: Path) -> str:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    return str(folder)


def of_another_kind(folder: Path) -> str:
    (folder / "tokenizer.json").write_text("{}")
    return str(folder / "tokenizer.json")


def damaged_settings(folder: Path) -> str:
    (save_tokenizer(folder) / "tokenizer_config.json").write_text("[")
    return str(folder)


def foreign_end(folder: Path) -> str:
    return str(save_tokenizer(folder, eos_token="<nowhere>"))


def sentencepiece(folder: Path) -> str:
    (folder / "tokenizer.model").write_bytes(b"x")
    return str(folder)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (damaged, "expected a tokenizer.json of Hugging Face, found something else at FOLDER/tokenizer.json"),
        (of_another_kind, "expected a tokenizer.json of Hugging Face"),
        (damaged_settings, "expected a JSON object, found a damaged file at FOLDER/tokenizer_config.json"),
        (foreign_end, "found no '<nowhere>' in FOLDER/tokenizer.json"),
        (
            sentencepiece,
            "expected tokenizer.json in FOLDER, found none; tokenizer.model is of an older format",
        ),
        (lambda folder: str(folder), "found none; set the folder of a model"),
        (lambda folder: f"{folder}/none.json", "or a hub name, found nothing at FOLDER/none.json"),
    ],
)
def test_tokenizers_that_cannot_be_read_are_refused(
    tmp_path: Path, make: Callable[[Path], str], message: str
) -> None:
    name = make(tmp_path)
    with pytest.raises(UserError) as caught:
        open_tokenizer(name)
    assert message.replace("FOLDER", str(tmp_path)) in str(caught.value)
    assert str(caught.value).startswith("data.tokenizer: ") and "\n" not in str(caught.value)


# ------------------------------------------------------------------------------
# The hub


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that fetching a file needs. Files of one model, below /me/tiny."""

    folder: Path
    asked: list[str]
    broken: set[str]  #: files for which it has no answer

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, body: bool) -> None:
        type(self).asked.append(self.path)
        prefix, file = "/me/tiny/resolve/", self.path.rpartition("/")[2]
        if not self.path.startswith(prefix):
            return self.reply(404, {"X-Error-Code": "RepoNotFound"})
        if self.path.startswith(prefix + "v9/"):
            return self.reply(404, {"X-Error-Code": "RevisionNotFound"})
        if file in self.broken:
            return self.reply(400, {})  # the library tries 5xx again for 20 s
        if not (self.folder / file).is_file():
            return self.reply(404, {"X-Error-Code": "EntryNotFound"})
        content = (self.folder / file).read_bytes()
        headers = {
            "ETag": f'"{hash(content):x}"',
            "X-Repo-Commit": "c" * 40,
            "Content-Length": str(len(content)),
        }
        return self.reply(200, headers, content if body else b"")

    def reply(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, type[Hub]]]:
    pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    save_tokenizer(tmp_path / "hub", chat_template="x")
    (tmp_path / "hub" / "model.safetensors").write_bytes(b"large")
    handler = type("Tiny", (Hub,), {"folder": tmp_path / "hub", "asked": [], "broken": set()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


def fetch(tmp_path: Path, endpoint: str, name: str, **variables: str) -> dict[str, Any]:
    """A fresh process opens it, because the library reads its variables once."""
    program = (
        "import json, sys\n"
        "from shardwright.train.data.tokens.tokenizers import open_tokenizer\n"
        "from shardwright.train.errors import UserError\n"
        "try:\n"
        "    t = open_tokenizer(sys.argv[1])\n"
        "    print(json.dumps({'ids': t.encode('the'), 'end': t.end, 'template': t.chat_template,"
        " 'files': sorted(p.name for p in t.file.parent.iterdir()), 'torch': 'torch' in sys.modules}))\n"
        "except UserError as error:\n"
        "    print(json.dumps({'error': str(error)}))\n"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        **variables,
    }
    command = [sys.executable, "-c", program, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.stderr == ""
    return result


@pytest.mark.extensive("a hub")
def test_a_hub_name_fetches_the_tokenizer_and_nothing_else(
    tmp_path: Path, hub: tuple[str, type[Hub]]
) -> None:
    endpoint, handler = hub
    local: Tokenizer = open_tokenizer(str(tmp_path / "hub"))
    found = fetch(tmp_path, endpoint, "me/tiny")
    assert found == {
        "ids": local.encode("the"),
        "end": 0,
        "template": "x",
        "files": ["tokenizer.json", "tokenizer_config.json"],
        "torch": False,
    }
    asked = {path.rpartition("/")[2] for path in handler.asked if path.startswith("/me/")}
    assert asked == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "special_tokens_map.json",
        "generation_config.json",
    }
    # What has been fetched is used without a connection.
    assert fetch(tmp_path, endpoint, "me/tiny", HF_HUB_OFFLINE="1") == found
    assert fetch(tmp_path, endpoint, "me/tiny@v1") == found


@pytest.mark.extensive("each failure of a network")
def test_names_that_cannot_be_fetched_say_why(tmp_path: Path, hub: tuple[str, type[Hub]]) -> None:
    endpoint, _ = hub
    message = fetch(tmp_path, endpoint, "me/none")["error"]
    assert "data.tokenizer: found nothing at me/none here, and no model me/none on http://127" in message
    assert "has no revision v9; set another" in fetch(tmp_path, endpoint, "me/tiny@v9")["error"]
    offline = fetch(tmp_path, endpoint, "me/tiny", HF_HUB_OFFLINE="1")["error"]
    assert "tokenizer.json of me/tiny is not in the local cache" in offline
    (tmp_path / "hub" / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in fetch(tmp_path, endpoint, "me/tiny")["error"]


def test_a_hub_that_does_not_answer_is_no_hub_without_the_file(
    tmp_path: Path, hub: tuple[str, type[Hub]]
) -> None:
    endpoint, handler = hub
    (tmp_path / "hub" / "tokenizer_config.json").unlink()
    handler.broken.add("tokenizer_config.json")
    message = fetch(tmp_path, endpoint, "me/tiny")["error"]
    missing = f"tokenizer_config.json of me/tiny is not in the local cache, and {endpoint} does not answer"
    assert missing in message and "set HF_HUB_OFFLINE=1" in message


@pytest.mark.extensive("it waits for a network")
def test_a_closed_port_is_asked_twice_and_prints_nothing(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    message = fetch(tmp_path, endpoint, "me/tiny")["error"]  # which checks that stderr is empty
    assert f"tokenizer.json of me/tiny is not in the local cache, and {endpoint} does not answer (" in message
    assert "Connection refused); correct the path of a folder, or connect this machine" in message
