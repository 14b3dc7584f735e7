"""The process in which lm-evaluation-harness computes: `python -P harness.py REQUEST RESULT`, two files of JSON.

It runs as a script of its own, and imports the standard library, lm_eval, and of the package alone what makes ids of
texts. `evaluate.py` starts it, and reads the result.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def evaluated(request: dict[str, Any]) -> dict[str, Any]:
    """Return the results of lm_eval, or {"mistake": ...} for a task that it does not know.

    Args:
        request: the keys folder, tasks, limit, device, batch_size, apply_chat_template, ids, which has the arguments
            of `with_ids_of_training`, and model_args, further arguments of lm_eval's class hf. A task is a name of
            lm_eval, or the absolute path of a YAML file. Without a folder the tasks are only looked up, and the results
            are empty.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    for task in request["tasks"]:
        if not os.path.isabs(task) and not manager.match_tasks([task]):
            return {"mistake": f"expected tasks of lm-eval, found {task!r}; `lm-eval ls tasks` lists them"}
    if request["folder"] is None:
        return {}
    from lm_eval.models.huggingface import HFLM

    with_ids_of_training(HFLM, **request["ids"])
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": request["folder"], "dtype": "auto", **request["model_args"]},
        tasks=request["tasks"],
        device=request["device"],
        batch_size=request["batch_size"],
        limit=request["limit"],
        task_manager=manager,
        log_samples=False,
        **({"apply_chat_template": True} if request["apply_chat_template"] else {}),
    )
    keys = ("results", "higher_is_better", "n-samples", "n-shot", "versions")
    return {"lm_eval": lm_eval.__version__, **{key: results.get(key, {}) for key in keys}}


def with_ids_of_training(model: Any, tokenizer: str, **settings: Any) -> None:
    """Let lm-eval's class for models of transformers give a model the ids of training, in this process.

    Its own methods encode a chat as a text, so that what messages spell becomes special tokens and a reply may begin
    inside of a token of its prompt. Of texts in windows it has the begin token twice.

    Args:
        model: the class.
        tokenizer: as in `[data]`.
        settings: the other attributes of `Requests`.
    """
    sys.path.append(str(Path(__file__).parents[4]))  # of this package, if it is not installed
    import torch

    from shardwright.train.data.tokens.requests import Requests
    from shardwright.train.data.tokens.tokenizers import open_tokenizer
    from shardwright.train.errors import UserError

    requests = Requests(open_tokenizer(tokenizer), **settings)
    rolling = model.loglikelihood_rolling

    def apply_chat_template(self: Any, chat_history: Any, add_generation_prompt: bool = True) -> str:
        messages = list(chat_history)
        try:
            return requests.chat(messages, continues=not add_generation_prompt)
        except UserError:
            without = [each for each in messages if each["role"] != "system"]
            if without == messages:
                raise
            return requests.chat(without, continues=not add_generation_prompt)  # as lm-eval does

    def tok_encode(
        self: Any,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **others: Any,
    ) -> list[int]:
        begins = False if getattr(self, "in_windows", False) else add_special_tokens
        return requests.ids(string, begins)[-(left_truncate_len or 0) :]

    def tok_batch_encode(
        self: Any,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [torch.tensor(tok_encode(self, each, left_truncate_len=left_truncate_len)) for each in strings]
        pad = self.tokenizer.pad_token_id or 0
        ids, mask = (
            torch.nn.utils.rnn.pad_sequence(values, True, fill, padding_side)
            for values, fill in ((rows, pad), ([torch.ones_like(row) for row in rows], 0))
        )
        return ids, mask

    def loglikelihood_rolling(self: Any, *arguments: Any, **keywords: Any) -> Any:
        self.in_windows = True  # it puts the prefix token before the first window
        try:
            return rolling(self, *arguments, **keywords)
        finally:
            self.in_windows = False

    model.apply_chat_template, model.tok_encode = apply_chat_template, tok_encode
    model.tok_batch_encode, model.loglikelihood_rolling = tok_batch_encode, loglikelihood_rolling
    model._encode_pair = lambda self, context, continuation: requests.pair(context, continuation)


def main(request: str, result: str) -> None:
    """Read a request and write its result; {"error": ...} for an exception, whose traceback goes to stderr."""
    with open(request, encoding="utf-8") as stream:
        content = json.load(stream)
    try:
        found = evaluated(content)
    except Exception as error:
        import traceback

        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    with open(result, "w", encoding="utf-8") as stream:
        json.dump(found, stream, default=str)


if __name__ == "__main__":
    main(*sys.argv[1:])
