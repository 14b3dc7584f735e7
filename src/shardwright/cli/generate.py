"""`shardwright generate`."""

from __future__ import annotations

from pathlib import Path

from shardwright.cli.command import Call, Command
from shardwright.cli.parsing import Parser, integer, number


def _run(call: Call) -> int:
    from shardwright.train.commands.generate import generate

    text = generate(
        Path(call.options.run),
        _as_typed(call.options.prompt),
        tokens=call.options.tokens,
        temperature=call.options.temperature,
        top_k=call.options.top_k,
        seed=call.options.seed,
        chat=call.options.chat,
        step=call.options.step,
    )
    print(text)
    return 0


def _as_typed(text: str) -> str:
    """Text of the command line, also if the terminal uses UTF-8 and the locale does not."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError:
        return text


def _add_options(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder with a checkpoint")
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        required=True,
        help='the text that the model continues; "": a document from its beginning, if the tokenizer marks it',
    )
    parser.add_argument(
        "--step", metavar="N", type=integer(0), help="step of the checkpoint (default: the newest whole one)"
    )
    parser.add_argument(
        "--chat", action="store_true",
        help="the prompt is a message of the user: put it into the run's chat template, and print the reply alone",
    )  # fmt: skip
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=integer(1),
        default=200,
        help="tokens to add at most; a token that ends a document ends the text (default 200)",
    )
    parser.add_argument(
        "--temperature", metavar="T", type=number(0), default=0.8,
        help="0: always the most likely token; larger: more random (default 0.8)",
    )  # fmt: skip
    parser.add_argument(
        "--top-k", metavar="K", type=integer(0), default=50,
        help="draw from the K most likely tokens; 0: from all (default 50)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", metavar="N", type=integer(0, 2**63 - 1), default=0, help="seed of the draws (default 0)"
    )


COMMAND = Command("generate", "continue a text with a trained model", _add_options, _run)
