"""Wrong commands through the command line: each is one line that names the thing and the fix, and writes nothing.

In the lists below three dots stand for any text. All cases share one folder, which `mistakes` fills.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("pyarrow", reason="needs pyarrow")
pytest.importorskip("jinja2", reason="needs jinja2")

from shardwright import cli
from shardwright.train.data.sources import lines
from tests.train.config.mistakes import as_a_user, make_data, make_models, state_of
from tests.train.kit.jobs import TINY, ranks, run
from tests.train.models.kit.architectures import folder_with
from tests.train.models.kit.foreign import JOB
from tests.train.models.kit.hub import hub

SOURCE = '[[data.sources]]\npath = "sound.jsonl"\nweight = 1\n'
TWO = f"{TINY}{SOURCE}[[data.sources]]\nweight = 1\n"

#: What a file holds, and the error.
FILES: list[tuple[str, str]] = [
    # sections, keys and values
    ("[modle]\ndim = 64", "wrong.toml: unknown section [modle]; did you mean [model]?"),
    ("[[train]]\nsteps = 3", "train: expected a table ([train]), found ... (a list); write [train]"),
    (
        "[train]\nsteps = 3\n[train]\nseq_len = 3",
        "wrong.toml: expected TOML: cannot declare ('train',) twice (at line 3",
    ),
    ("train:\n  steps: 3\n", "wrong.toml: expected TOML: expected '=' after a key ... (at line 1"),
    ("lr = 3", "unknown key lr; did you mean optimizer.lr?"),
    ("[run]\nsede = 3", "unknown key run.sede; did you mean run.seed?"),
    ("[run]\nname = 'a/b'", "run.name: expected letters, digits, ... found \"a/b\""),
    ("[run]\ndevice = 'gpu'", "run.device: expected one of ... found \"gpu\" (a string); did you mean cuda?"),
    ("[train]\nbatch_size = 3", "unknown key train.batch_size; did you mean train.micro_batch?"),
    ("[train]\nsteps = 1e3", "train.steps: expected an integer >= 1, found 1000.0 (a number); write 1000"),
    ("[train]\ncompile = true", "train.compile: expected one of ... found true (a boolean); did you mean inductor?"),
    ("[train]\nseq_len = 99999", "wrong.toml: train.seq_len: expected at most model.max_seq_len = 2048, found 99999"),
    ("[train]\nglobal_batch = 10\nmicro_batch = 4", "train.global_batch: ... found 10; nearest that fit: 8 or 12, or"),
    (
        "[optimizer]\nlr = '3e-4'",
        'optimizer.lr: expected a number > 0, found "3e-4" (a string); write it without quotes',
    ),
    ("[optimizer]\nlearning_rate = 1e-3", "unknown key optimizer.learning_rate; did you mean optimizer.lr?"),
    ("[optimizer]\nbetas = 0.9", "optimizer.betas: expected a list of 2 numbers >= 0 and < 1, found 0.9"),
    ("[optimizer]\nname = 'adam'", "optimizer.name: expected one of ... found 'adam'; did you mean 'adamw'?"),
    ("[optimizer]\nmomentum = 0.9", "wrong.toml: optimizer.momentum: ... expected 0.95, found 0.9. Only muon has it"),
    ("[optimizer.options]\nnesterov = true", "optimizer.options.nesterov: optimizer 'adamw' has no such option"),
    ("[parallel]\nstrategy = 'zero4'", "parallel.strategy: ... found 'zero4'; did you mean 'zero3'?"),
    ("[parallel]\nstrategy = 'FULL_SHARD'", "parallel.strategy: ... found 'FULL_SHARD'; did you mean 'zero3'?"),
    ("[parallel]\nengine = 'deepspeed'", 'and use parallel.strategy = "zero3"; see docs/migration/deepspeed.md'),
    ("[data]\nkind = 'chat'", "data.kind: expected one of ... did you mean conversations?"),
    ("[parallel]\nlayout = 'raged'", "parallel.layout: ... found 'raged'; did you mean 'ragged'?"),
    ("[parallel]\nmemory = 'arean'", "parallel.memory: ... found 'arean'; did you mean 'arena'?"),
    (
        "[parallel]\nprefetch = '512 MB'",
        'parallel.prefetch: expected an integer >= 0 or bytes, such as "512 MiB", found',
    ),
    ("[parallel]\nparam_dtype = 'bf16'", "parallel.param_dtype: expected one of float32, bfloat16, found \"bf16\""),
    ("[parallel]\noffload = true", "parallel.offload: expected one of none, cpu, optimizer, found true"),
    (
        "[parallel]\nreshard_after_forward = true",
        "expected one of default, always, never or an integer >= 1, found true",
    ),
    (
        "[activations]\ncheckpoint = true",
        "activations.checkpoint: expected one of none, full, layers, ops, half_ops, budget, found",
    ),
    (
        "[activations]\noffload = 'inputs'",
        "activations.offload: expected 'none' or 'blocks' with activations.checkpoint = 'none', found 'inputs'",
    ),
    (
        "[activations]\noffload = 'blocks'\n[parallel]\nengine = 'fsdp1'",
        "activations.offload: expected 'none' with parallel.engine 'fsdp1', found 'blocks'; its weights are views",
    ),
    ("[activations]\noffload = true", "activations.offload: expected one of none, blocks, inputs, found true"),
    ("[activations]\nbudget = 0.3", "activations.budget: only for checkpoint = 'budget'; with 'none' expected 0.5"),
    ("[validation]\nevery = -1", "validation.every: expected an integer >= 0, found -1"),
    ("[checkpoint]\ndir = 'x'", "wrong.toml: unknown key checkpoint.dir; did you mean run.dir?"),
    ("[checkpoint]\nevery = 1.5", "wrong.toml: checkpoint.every: expected an integer >= 0, found 1.5 (a number)"),
    ("[checkpoint]\nkeep = 'all'", 'wrong.toml: checkpoint.keep: expected an integer >= 1, found "all" (a string)'),
    ("[checkpoint]\nkeep = 0", "checkpoint.keep: expected an integer >= 1, found 0"),
    ("[checkpoint]\nkeep_every = -1", "checkpoint.keep_every: expected an integer >= 0, found -1"),
    (
        "[checkpoint]\non_save_failure = 'ignore'",
        "checkpoint.on_save_failure: expected one of stop, continue, found \"ignore\"",
    ),
    ("[log]\nsink = ['wandb']", "unknown key log.sink; did you mean log.sinks?"),
    ("[log]\nsinks = 'wandb'", 'log.sinks: expected a list of values, ... found "wandb" (a string); write ["wandb"]'),
    ("[profile]\nsteps = 10", "profile.steps: expected a list of values, ... found 10 (an integer); write [10, 10]"),
    ("[profile]\nranks = 3", "profile.ranks: expected ... or all, found 3 (an integer); write [3, 3]"),
    ("[train]\nmemory_snapshot = 3", "train.memory_snapshot: ... found 3 (an integer); write [3]"),
    ("[log]\nsinks = 3", 'log.sinks: ... found 3 (an integer); write ["tensorboard"]'),
    ("[log]\nsinks = ['own_models']", "log.sinks: expected one of ... or an import path (package.module:NAME), found"),
    (
        "[log]\nsinks = ['sinks.py:SINK']",
        "log.sinks: ... No module named 'sinks'. ... An import path has no .py: sinks:SINK",
    ),
    ("[log]\nsinks = ['tensorboard', 'tensorboard']", "log.sinks: found 'tensorboard' twice. ... Name each sink once"),
    (
        "[log]\nsinks = ['own_models:Model']",
        "log.sinks: ... expected a NamedSink at own_models:Model, found the class Model",
    ),
    ("[log]\nevery = 0", "wrong.toml: log.every: expected an integer >= 1, found 0"),
    ("[log]\nsinks = ['wandbb']", "log.sinks: expected one of ... found 'wandbb'; did you mean 'wandb'?"),
    (
        "[log]\nsinks = ['my_sinks:SINK']",
        "log.sinks: ... No module named 'my_sinks'. Start in the folder that has my_sinks.py",
    ),
    (
        "[log]\nsinks = ['own_models:SINK']",
        "log.sinks: ... 'own_models' has no attribute 'SINK'; correct the name after",
    ),
    ("[log]\nsinks = ['own_models:VALUE']", "log.sinks: ... expected a NamedSink at own_models:VALUE, found int"),
    # [model] of every kind
    ("[model]\nkind = 'lama'", "model.kind: ... found 'lama'; did you mean 'llama'?"),
    (
        "[model]\npreset = '7B'",
        "model.preset: expected one of debug, ... 405B with kind 'llama', found '7B'; did you mean '8B'?",
    ),
    ("[model]\nn_experts = 4", "model.n_experts: kind 'llama' has none; expected it with kind 'hybrid' only"),
    ("[model]\npath = 'llama'", "model.path: kind 'llama' has none; expected it with kind 'hf' only"),
    ("[model]\ndim = 100\nn_heads = 3", "model.dim: expected a multiple of 2 x n_heads = 6"),
    (
        "[model.rope_scaling]\nfactr = 2.0",
        "unknown key model.rope_scaling.factr; did you mean model.rope_scaling.factor?",
    ),
    ("[model]\nkind = 'hybrid'\npattern = 'MXM'", "model.pattern: expected only the characters ... found 'X'"),
    ("[model]\nkind = 'hybrid'\ntop_k = 99", "model.top_k: expected at most n_experts = 8, found 99"),
    ("[model]\nkind = 'hf'", "model.path: expected the folder of a model with a config.json, or its name on the"),
    ("[model]\nkind = 'hf'\npth = 'llama'", "unknown key model.pth; did you mean model.path?"),
    (
        "[model]\nkind = 'hf'\npath = 'llama'\nweights = 'pretraind'",
        "model.weights: expected one of pretrained, random, found",
    ),
    ("[model]\nkind = 'hf'\npath = 'llama'\ndim = 64", "model.dim: kind 'hf' has none; expected it with kind 'llama'"),
    ("[model]\nkind = 'python'", "model.target: expected the import path of a function that builds the model, such as"),
    (
        "[model]\nkind = 'python'\ntarget = 'own_models'",
        "model.target: ... name the function after a colon, as in own_models:build",
    ),
    (
        "[model]\nkind = 'python'\ntarget = 'own_models:Model'\narguments = {vocab_size = 3}",
        "model.arguments: expected no vocab_size here; set the key model.vocab_size",
    ),
    # [finetune]
    ("[finetune]\nmethod = 'qlora'", "finetune.method: expected one of full, lora, dora, found \"qlora\""),
    ("[finetune]\nrank = 8", "finetune.rank: found 8 with method 'full', ... set finetune.method to 'lora'"),
    ("[finetune]\nmethod = 'lora'\nr = 8", "unknown key finetune.r; did you mean finetune.rank?"),
    ("[finetune]\nmethod = 'lora'\nlora_alpha = 8", "unknown key finetune.lora_alpha; did you mean finetune.alpha?"),
    ("[finetune]\nmethod = 'lora'\ntargets = 'wq'", 'finetune.targets: expected a list of strings, ... write ["wq"]'),
    (
        "[finetune]\nmethod = 'dora'\ndropout = 0.1",
        "finetune.dropout: expected 0 with method 'dora', found 0.1; or set finetune.method to 'lora'",
    ),
    # [data] and tables of data.sources
    ("[data]\nsuorce = 'x'", "unknown key data.suorce; did you mean data.source?"),
    ("[data]\nsource = []", "wrong.toml: data.source: expected a value that is not empty, found [] (a list)"),
    ("[data]\nsource = ['a.txt', '']", 'wrong.toml: data.source: expected a value that is not empty, found ""'),
    ("[data]\npacking = 'best-fit'", "data.packing: expected one of split, best_fit, none, found \"best-fit\""),
    (
        "[data]\npacking = 'best_fit'\ndocument_mask = false",
        "data.document_mask: expected 'auto' with packing 'best_fit', ... found false; or set data.packing to 'split'",
    ),
    ("[data]\nvalidation_fraction = 5", "data.validation_fraction: expected a number >= 0 and < 1, found 5"),
    ('[data]\nsources = ["a.txt", "b.txt"]', "data.sources.0: expected a table, ... write a table [[data.sources]]"),
    (SOURCE.replace("sources", "source"), "data.source: expected a string or ... (a list); write [[data.sources]]"),
    (
        SOURCE.replace("[[", "[").replace("]]", "]"),
        "data.sources: expected a list of tables, ... write a table [[data.sources]]",
    ),
    (SOURCE.replace("weight", "wieght"), "unknown key data.sources.0.wieght; did you mean data.sources.0.weight?"),
    (f"{SOURCE}{SOURCE}kindd = 'documents'", "unknown key data.sources.1.kindd; did you mean data.sources.1.kind?"),
    (f"{SOURCE}packing = 'none'", "unknown key data.sources.0.packing; did you mean data.packing?"),
    (f"{SOURCE}zzzz = 1", "unknown key data.sources.0.zzzz; the keys of [[data.sources]] are path, weight, kind"),
    (SOURCE.replace("1", "0"), "data.sources.0.weight: expected a number > 0, found 0"),
    (SOURCE + SOURCE.replace("1", "-0.5"), "data.sources.1.weight: expected a number > 0, found -0.5"),
    (SOURCE.replace("1", '"30%"'), 'data.sources.0.weight: expected a number > 0, found "30%" (a string)'),
    (SOURCE.replace("weight = 1", ""), "data.sources.0.weight: expected a number > 0, found none"),
    (f"{SOURCE}kind = 'chats'", "data.sources.0.kind: expected one of documents, conversations, completions, found"),
    (
        f"[data]\nsource = 'x.txt'\n{SOURCE}",
        "wrong.toml: data.source: expected it in each of data.sources, ... move it there",
    ),
    (
        f'{TWO}path = "nowhere.jsonl"',
        "data.sources.1.path: expected a file, found nothing at FOLDER/nowhere.jsonl; ",
    ),
    (
        f'{TWO}path = "null.jsonl"',
        "data.sources.1.text_key: ... nothing (null) in 'text' of line 3 of FOLDER/null.jsonl; remove",
    ),
    (
        f'{TWO}path = "sound.jsonl"\ntext_key = "body"',
        "data.sources.1.text_key: expected key 'body' in each row, found only 'text' in line 1",
    ),
    (
        f'{TWO}path = "chats.jsonl"\ntext_key = "messages"',
        'data.sources.1.text_key: expected a string, found list ... set data.sources.1.kind = "conversations"',
    ),
    (
        f'{TWO}path = "unanswered.jsonl"\nkind = "completions"',
        "data.sources.1.completion_key: expected texts to train on, found 99 empty completions in unanswered.jsonl; se",
    ),
    (
        f'{TWO}path = "sound.txt"'.replace("]]\nweight = 1\npath", "]]\nweight = 1e-9\npath"),
        "data.sources: expected a weight that gives sound.txt at least ... found 1e-09 of 1; raise its weight or leave",
    ),
]  # fmt: skip

ENGINE = "--parallel.engine shardwright"
NO_SLOT = "all units keep their full parameters, so no slot ever becomes free"
LORA = f"{ENGINE} --finetune.method lora --finetune.rank 4"
CHATS = "--data.source chats.jsonl --data.kind conversations"

#: Options of the tiny job, and the error.
OPTIONS: list[tuple[str, str]] = [
    ("--train.stpes 3", "command line: unknown key train.stpes; did you mean train.steps?"),
    ("--train.steps", "--train.steps: expected a value after it, found none; write --train.steps VALUE"),
    ("--steps 3", "unknown option --steps; did you mean --train.steps?"),
    ("--nproc 0", "argument --nproc: expected an integer >= 1, found '0'"),
    (
        "--data.sources.0.weight 3",
        "command line: data.sources.0.weight: one table of a list cannot be set here; change it in",
    ),
    (
        "--data.sources '[{path=a.txt, weight=1}]'",
        "data.sources: expected a list of tables, ... put the list into single quotes, or the shell removes the double",
    ),
    ("--train.memory_snapshot [three]", 'an integer >= 1, found "[three]" (a string)'),
    ("--profile.steps [3,2]", "profile.steps: expected [FIRST, LAST] with 1 <= FIRST <= LAST, found [3, 2]"),
    ("--profile.steps [3]", "profile.steps: expected [FIRST, LAST] with 1 <= FIRST <= LAST, found [3]"),
    ("--profile.steps [-1,2]", "profile.steps: expected a list of values, each an integer >= 1, found -1"),
    ("--profile.steps [2,9]", "profile.steps: expected [FIRST, LAST] with LAST <= train.steps = 8, found [2, 9]"),
    ("--profile.steps [2,3] --profile.ranks [1]", "profile.ranks: expected ranks below 1, ... found 1"),
    (
        "--data.source [sound.txt,sound.jsonl]",
        "data.source: expected a string or a list of strings, found ...; write '[\"sound.txt\", \"sound.jsonl\"]'",
    ),
    (
        "--log.sinks [wandb,mlflow]",
        "found \"[wandb,mlflow]\" (a string); write '[\"wandb\", \"mlflow\"]': without single quotes the shell removes",
    ),
    ("--data.sources '[{path=\"a.txt\", weigth=1}]'", "command line: unknown key data.sources.0.weigth; did you mean"),
    # strategy, layout, memory, parallel
    (
        f"{ENGINE} --parallel.strategy hsdp",
        "parallel.replicas: expected at least 2 with strategy 'hsdp', found 1; or set strategy = 'zero3'",
    ),
    (
        "--parallel.engine ddp --parallel.reshard_after_forward 2",
        "parallel.reshard_after_forward: expected 'default' with engine ddp, which shards nothing, found 2",
    ),
    (
        f"{ENGINE} --parallel.strategy zero2 --parallel.memory max_pool",
        f"parallel.memory: expected 'arena' or 'dynamic' with parallel.strategy 'zero2', found 'max_pool'; {NO_SLOT}",
    ),
    (
        f"{ENGINE} --parallel.reshard_after_forward never --parallel.memory double_buffer",
        f"parallel.memory: ... with parallel.reshard_after_forward 'never', found 'double_buffer'; {NO_SLOT}",
    ),
    (f"{ENGINE} --train.cuda_graph true", "train.cuda_graph: expected false on the CPU, found true; it needs a CUDA"),
    ("--train.memory_snapshot [3]", "train.memory_snapshot: expected [] on the CPU, found [3]; it needs a CUDA device"),
    (
        f"{ENGINE} --parallel.strategy zero1 --parallel.reshard_after_forward always",
        "strategy 'zero1' keeps parameters whole until the optimizer's step; expected 'default' or 'never', found",
    ),
    (f"{ENGINE} --optimizer.lr nan", "command line: optimizer.lr: expected a number > 0, found nan (a number)"),
    (
        f"{ENGINE} --parallel.replicas 2 --nproc 2",
        "parallel.replicas: expected 1 with strategy 'zero3', ... set strategy = 'hsdp'",
    ),
    (
        f"{ENGINE} --parallel.strategy hsdp --parallel.replicas 2 --nproc 3 --train.global_batch 12",
        "parallel.replicas: expected a divisor of the number of ranks, 3, found 2",
    ),
    (f"{ENGINE} --nproc 3", "train.global_batch: expected a multiple of 3 ranks x ... nearest that fit: 6 or 12"),
    (f"{ENGINE} --nproc 2 --train.global_batch 6", "2 ranks x train.micro_batch = 2 (that is 4), found 6; ... 4 or 8,"),
    (f"{ENGINE} --nproc 2 --data.source gone.txt", "data.source: expected a file, found nothing at FOLDER/gone.txt"),
    (
        "--nproc 2",
        "parallel.engine: the engine 'none' runs on exactly 1 rank, found 2; use --nproc 1 or another engine",
    ),
    (f"{ENGINE} --parallel.tensor 4 --nproc 4", "model.n_heads: expected a multiple of parallel.tensor = 4, found 2"),
    (f"{ENGINE} --parallel.expert 2 --nproc 2", "parallel.expert: expected 1 for a model without experts, found 2"),
    (
        "--parallel.engine fsdp1 --parallel.tensor 2 --nproc 2",
        "parallel.tensor: engine 'fsdp1' has no tensor parallelism",
    ),
    ("--parallel.engine fsdp2 --parallel.memory arena", "parallel.memory: expected 'dynamic' with engine 'fsdp2'"),
    (
        "--parallel.engine fsdp2 --optimizer.name muon",
        "optimizer.name: muon needs whole matrices, ... expected 'adamw'",
    ),
    (f"{ENGINE} --optimizer.in_backward true", "train.max_norm: expected 0 with optimizer.in_backward, found 1.0"),
    (f"{ENGINE} --parallel.grad_dtype bfloat16", "parallel.grad_dtype: expected 'auto' ... use adamw8bit"),
    (
        f"{ENGINE} --parallel.param_dtype bfloat16 --parallel.keep_float32 '[\"*nrom*\"]'",
        "parallel.keep_float32: ... found '*nrom*', which matches none of tok_embeddings.weight",
    ),
    (f"{ENGINE} --parallel.reshard_after_forward 3 --nproc 2", "expected a divisor of the number of ranks that shard"),
    ("--parallel.engine fsdp1 --train.compile inductor", "train.compile: expected 'none' with parallel.engine 'fsdp1'"),
    (
        "--train.float8 tensorwise --parallel.param_dtype bfloat16",
        "train.float8: expected a GPU ... found the CPU; set it to 'none'",
    ),
    (
        f"{LORA} --finetune.targets '[\"q_proj\"]'",
        "finetune.targets: ... found 'q_proj', which fits none; there are wq, wk",
    ),
    (
        f"{LORA} --finetune.train_also '[\"nrom\"]'",
        "finetune.train_also: ... 'nrom', which fits none; near names: norm.weight",
    ),
    (f"{LORA} --finetune.rank 400", "finetune.rank: expected at most 32, ... choose a smaller rank"),
    (
        f"{LORA} --finetune.adapters texts",
        "texts: expected a folder of adapters, found no adapter_config.json in it; correct",
    ),
    (
        f"{LORA} --finetune.adapters sound.txt",
        "sound.txt: expected a folder of adapters, found a file; correct finetune.adapters",
    ),
    (
        f"{LORA} --finetune.adapters done",
        "done: expected a folder of adapters, ... with shardwright export --adapters done DIR, and set that folder",
    ),
    (
        f"{LORA} --finetune.targets '[\"norm\"]'",
        "finetune.targets: ... a RMSNorm without a matrix; ... train it in full: finetune.train_also = ['norm.*']",
    ),
    (
        "--finetune.method dora --train.float8 rowwise --parallel.param_dtype bfloat16",
        "train.float8: expected 'none' with finetune.method = 'dora', found 'rowwise'",
    ),
    ("--run.dir sound.txt", "run.dir: expected a folder, found a file at sound.txt"),
    ("--run.dir sound.txt/run", "run.dir: sound.txt/run: cannot write: Not a directory; ... Choose another folder"),
    ("--run.dir closed/run", "run.dir: closed/run: cannot write: Permission denied; ... in which you may write"),
    # tokenizers
    ("--data.tokenizer byte", "data.tokenizer: found nothing at byte; did you mean bytes?"),
    ("--data.tokenizer texts", "data.tokenizer: expected tokenizer.json in FOLDER/texts, found none; set the folder o"),
    (
        "--data.tokenizer tokenizer --data.source sound.jsonl --model.vocab_size 256",
        "model.vocab_size: expected at least the tokenizer's 700, found 256; set model.vocab_size to 700 or leave",
    ),
    (
        "--data.tokenizer ./nowhere",
        "data.tokenizer: expected bytes, the path of a tokenizer.json ... found nothing at ./nowhere",
    ),
    (
        "--data.tokenizer me/llma",
        "data.tokenizer: found nothing at me/llma here, and no model me/llma on http://...; correct the name",
    ),
    (
        "--data.tokenizer tokenizer-cut",
        "data.tokenizer: ... FOLDER/tokenizer-cut/tokenizer.json (EOF ...); copy it again",
    ),
    (
        "--data.tokenizer tokenizer-eos",
        "data.tokenizer: ... found no '<stop>' in ...; take both files from the same model",
    ),
    (
        "--data.tokenizer tokenizer-json",
        "data.tokenizer: ... a damaged file at FOLDER/tokenizer-json/tokenizer_config.json",
    ),
    (
        "--data.tokenizer tokenizer-old",
        "data.tokenizer: ... vocab.json is of an older format: open it with ... save_pretrained",
    ),
    (
        "--data.cache closed/cache --data.source sound.jsonl",
        "data.cache: FOLDER/closed/cache: cannot write: Permission denied",
    ),
    # sizes of data
    (
        "--data.source tiny.jsonl",
        "train.seq_len: expected at most 2, since tiny.jsonl has 3 tokens to train on, found 32; use",
    ),
    (
        "--data.source short.jsonl --train.seq_len 16",
        "found 1 token in the validation part of short.jsonl; raise data.validation_fraction",
    ),
    (
        "--data.source sound.jsonl --data.validation_fraction 0.001",
        "validation part of sound.jsonl has 7 tokens, ... validation.every to 0",
    ),
    (
        "--data.source sound.jsonl --data.validation_fraction 0.999",
        "8 tokens to train on, found 32; ... lower data.validation_fraction",
    ),
    ("--data.validation_fraction 0", "validation.every: expected 0, since data.validation_fraction = 0 leaves no text"),
    # what rows hold
    (
        "--data.source sound.jsonl --data.text_key body",
        "data.text_key: expected key 'body' in each row, found only 'text' in line 1 of FOLDER/sound.jsonl; set",
    ),
    (
        "--data.source sound.parquet --data.text_key number",
        "data.text_key: expected strings, found int64 in column 'number' of ... set",
    ),
    (
        "--data.source sound.parquet --data.text_key body",
        "data.text_key: expected key 'body' in each row, found only 'text', 'number' in ... set data.text_key to",
    ),
    (
        "--data.source chats.jsonl",
        "data.text_key: expected key 'text' in each row, found only 'messages' ... or data.kind = \"conversations\"",
    ),
    (
        f"{CHATS}",
        "data.chat_template: expected a chat template for conversations, ... set data.chat_template to a file",
    ),
    (
        f"{CHATS} --data.chat_template nowhere.jinja",
        "data.chat_template: cannot read nowhere.jinja: No such file ...; set the path",
    ),
    (
        f"{CHATS} --data.chat_template bad.jinja",
        "data.chat_template: ... an error at line 1 of bad.jinja (...); mend it",
    ),
    (
        f"{CHATS} --data.chat_template empty.jinja",
        "data.chat_template: ... an empty one in empty.jinja; set another file",
    ),
    (
        f"{CHATS} --data.chat_template silent.jinja",
        "data.source: expected trained tokens in chats.jsonl, found 0 ... check that",
    ),
    (
        f"{CHATS} --data.source sharegpt.jsonl --data.chat_template silent.jinja",
        "data.messages_key: ... 'from', 'value' in message 1",
    ),
    (
        "--data.source unanswered.jsonl --data.kind completions",
        "data.completion_key: ... found 99 empty completions in unanswered",
    ),
    (
        "--data.source pairs.jsonl --data.kind completions --data.completion_key answer",
        "data.completion_key: expected key 'answer'",
    ),
    (
        "--data.source sound.txt --data.kind conversations",
        "data.source: ... found FOLDER/sound.txt; set data.kind = \"documents\"",
    ),
]  # fmt: skip

#: A value of data.source, and the error.
DATA: list[tuple[str, str]] = [
    ("cut.jsonl", "an error at column 10 of line 200 of FOLDER/cut.jsonl ... seems to be cut off: copy the file again"),
    ("latin.jsonl", "found byte 0xe9 at offset 113 of FOLDER/latin.jsonl, in line 3 ...; convert the file to UTF-8"),
    (
        "number.jsonl",
        "data.text_key: expected a string, found int in 'text' of line 3 of FOLDER/number.jsonl; write it as a",
    ),
    ("list.jsonl", "expected a JSON object per line, found list in line 3 of FOLDER/list.jsonl; write an object"),
    ("nul.jsonl", "an error at column 12 of line 3 of FOLDER/nul.jsonl ... the line has NUL bytes, ... copy the file"),
    ("nuls.jsonl", "line 3 of FOLDER/nuls.jsonl ... the line has NUL bytes, as after a crash: copy the file again"),
    (
        "single.jsonl",
        "an error at column 2 of line 3 of FOLDER/single.jsonl (Expecting property name enclosed in double",
    ),
    ("bom.jsonl", "a byte order mark at the start of line 1 of FOLDER/bom.jsonl; save the file as UTF-8 without it"),
    ("utf16.jsonl", "found UTF-16 in FOLDER/utf16.jsonl; convert the file to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    (
        "huge.jsonl",
        "found more than 65,536 bytes without a line feed in line 1 of FOLDER/huge.jsonl; write one document",
    ),
    ("gzip.jsonl", "found gzip's bytes in FOLDER/gzip.jsonl; unpack the file first"),
    ("gzip.txt", "found gzip's bytes in FOLDER/gzip.txt; unpack the file first"),
    ("rows.jsonl.gz", "found FOLDER/rows.jsonl.gz; unpack it first"),
    ("rows.csv", "found FOLDER/rows.csv; convert it to .parquet or .jsonl"),
    ("empty.jsonl", "found an empty file at FOLDER/empty.jsonl; remove it from data.source, or copy it again"),
    ("linefeeds.jsonl", "expected text, found none in linefeeds.jsonl; remove it, or correct the file"),
    ("array.jsonl", "line 1 of FOLDER/array.jsonl ... one JSON value over many lines: write one object per line"),
    ("latin.txt", "found byte 0xe9 at offset 38 of FOLDER/latin.txt; convert the file to UTF-8"),
    ("link.jsonl", "found a link to nowhere.jsonl, which leads nowhere, at FOLDER/link.jsonl; correct the link"),
    ("loop.jsonl", "found a link to loop.jsonl, which leads nowhere, at FOLDER/loop.jsonl; correct the link"),
    ("folder.txt", "found a folder at FOLDER/folder.txt; set the path of"),
    ("texts", "found a folder at FOLDER/texts; set FOLDER/texts/*.jsonl"),
    ("http://127.0.0.1:9/rows.jsonl", "cannot read http://127.0.0.1:9/rows.jsonl: ...; correct the URL, or check the"),
    ("nosuch://rows.jsonl", "expected a path or a URL that fsspec knows, ... found nosuch://rows.jsonl"),
    ('["sound.txt", "own_models.py"]', "expected pydoc or the path of ..., found FOLDER/own_models.py"),
    ("texts/*.txt", "found none that match FOLDER/texts/*.txt; correct the folder or the pattern"),
    ("sounds.jsonl", "found nothing at FOLDER/sounds.jsonl; did you mean sound."),
    ('["sound.jsonl", "nowhere.jsonl"]', "found nothing at FOLDER/nowhere.jsonl; did you mean"),
    ("denied.jsonl", "cannot read FOLDER/denied.jsonl: Permission denied; allow this user to read it"),
    (
        "floats.npy",
        "expected tokens as whole numbers, found float32 in FOLDER/floats.npy; save ids.astype(numpy.uint32)",
    ),
    ("square.npy", "found the shape (30, 30) in FOLDER/square.npy; save ids.reshape(-1)"),
    (
        "negative.npy",
        "expected ids from 0 to 255, ... found -1 at position 900 of FOLDER/negative.npy; set the tokenizer",
    ),
    ("beyond.npy", "expected ids from 0 to 255, ... found 256 at position 900 of FOLDER/beyond.npy; set the tokenizer"),
    ("cut.npy", "expected 3,000 tokens ... found 2,995 in FOLDER/cut.npy; the file is cut off: copy it again"),
    ("text.npy", "found a damaged one at FOLDER/text.npy (...); save it with numpy.save"),
    ("pickled.npy", "found object in FOLDER/pickled.npy; save ids"),
    ("cut.parquet", "FOLDER/cut.parquet (...); it is damaged or cut off: copy or write it again"),
    ("text.parquet", "FOLDER/text.parquet (...); it is damaged or cut off: copy or write it again"),
    (
        "cut.arrow",
        "found none in FOLDER/cut.arrow; the file is cut off, or its writer was not closed: write or copy it",
    ),
    ("text.arrow", "FOLDER/text.arrow (...); it is damaged or cut off: copy or write it again"),
]  # fmt: skip

PYTHON = "--model.kind python --model.target own_models"
HF = "--model.kind hf --model.path"

#: Options of the tiny job without a model, and the error.
MODELS: list[tuple[str, str]] = [
    (
        f"{HF} ./llma",
        "model.path: expected a folder with a config.json, or a name on the hub ... found './llma', which is",
    ),
    (
        f"{HF} me/llma",
        "model.path: found nothing at me/llma here, and no model me/llma on http://...; correct the name",
    ),
    (
        f"{HF} llama/config.json",
        "model.path: expected a folder ..., found a file at llama/config.json; set the folder llama",
    ),
    (f"{HF} sound.txt", "model.path: expected a folder with a config.json, found a file at sound.txt; set the folder"),
    (f"{HF} texts", "model.path: ... found none in FOLDER/texts; set the folder of a model, or its"),
    (f"{HF} llama-weightless", "model.path: expected weights (...) in llama-weightless, found none; ... \"random\""),
    (
        f"{HF} llama-json",
        "model.path: cannot read FOLDER/llama-json/config.json: JSONDecodeError: ...; copy or fetch the file",
    ),
    (
        f"{HF} llama-wide",
        "model.path: ...gate_proj.weight' ... expected shape (48, 16), found (32, 16)...; take config.json and",
    ),
    (
        f"{HF} llama-deeper",
        "model.path: ... Missing in the files (9): ...; take config.json and the weights from the same model",
    ),
    (
        f"{HF} llama-index",
        "index names files that are missing: model-00001-of-00002.safetensors; copy or fetch the files",
    ),
    (f"{HF} llama-index-json", "model.path: ... expected JSON with a \"weight_map\" ...; copy or fetch the files"),
    (
        f"{HF} llama-cut",
        "llama-cut/model.safetensors: the header does not fit ...; copy or fetch the files of the model again",
    ),
    (f"{HF} llama-header", "llama-header/model.safetensors: expected a safetensors file, ...; copy or fetch the files"),
    (
        f"{HF} bert",
        "model.path: expected a causal language model ..., found BertModel in the config.json of bert; set another",
    ),
    (
        f"{HF} llama --train.seq_len 128",
        "train.seq_len: expected at most 64, the positions that the model has, found 128",
    ),
    (f"{HF} llama --parallel.tensor 2 --nproc 2", "parallel.tensor: expected 1 with model.kind 'hf', found 2"),
    (
        f"{HF} llama --model.blocks model.layerz",
        "model.blocks: expected ... (model.layers (3 x ...)), found 'model.layerz'",
    ),
    (
        f"{HF} llama --data.tokenizer tokenizer --data.source sound.jsonl",
        "model.path: ... vocabulary of at least the tokenizer's 700, found 256; take another model, or",
    ),
    (f"{HF} gpt2 --finetune.method lora", "finetune.method: ... matrices are in Conv1D, ... Use method = 'full'"),
    (
        f"{HF} llama --finetune.method lora --parallel.engine fsdp1",
        "parallel.engine: expected 'shardwright', 'fsdp2', 'ddp'",
    ),
    (
        "--model.kind python --model.target nowhere:build",
        "model.target ... No module named 'nowhere'. Start in the folder that has",
    ),
    (
        "--model.kind python --model.target broken_syntax:build",
        "model.target ... SyntaxError: ... (broken_syntax.py, line 1)",
    ),
    ("--model.kind python --model.target needs_more:build", "model.target ... imports no_such_package: install it"),
    ("--model.kind python --model.target own_models.py:Model", "An import path has no .py: own_models:Model"),
    (f"{PYTHON}:Modle", "model.target ... has no attribute 'Modle'; did you mean own_models:Model?"),
    (
        f"{PYTHON}:VALUE",
        "model.target: found int at 'own_models:VALUE'; expected a function that returns ... See docs/models.md",
    ),
    (f"{PYTHON}:words", "found a function that returns str at 'own_models:words'; expected ... See docs/models.md"),
    (
        f"{PYTHON}:broken",
        "'own_models:broken' raised ZeroDivisionError: ... (own_models.py, line ...). Correct this function",
    ),
    (f"{PYTHON}:forward_without_tokens", "found Module without a forward at 'own_models:forward_without_tokens'"),
    (f"{PYTHON}:Layerless", "model.blocks: ... found no list in Layerless; put the layers into such a list"),
    (
        f"{PYTHON}:Model --model.arguments.widht 3",
        "model.arguments: ... unexpected keyword argument 'widht'; did you mean width?",
    ),
    (
        f"{PYTHON}:Model --model.arguments.width wide",
        "raised TypeError: ... (own_models.py, line ...). Correct this function",
    ),
    (
        f"{PYTHON}:Flat",
        "returned a tensor of shape [8, 256] ...; expected a float tensor of logits of shape [1, 8, 256]",
    ),
    (
        f"{PYTHON}:Narrow",
        "returned a tensor of shape [1, 8, 5] ...; expected a float tensor of logits of shape [1, 8, 256]",
    ),
    (f"{PYTHON}:Tuple", "returned a tuple of 2 ...; expected a float tensor of logits of shape [1, 8, 256]"),
    (f"{PYTHON}:SeesAll", "is not causal: another last token changes the logits ... Give its attention a causal mask"),
    (
        f"{PYTHON}:BadLoss",
        "loss(batch) of the model of 'own_models:BadLoss' returned a tensor ...; expected the mean loss",
    ),
    (
        f"{PYTHON}:Failing",
        "forward of the model ... raised RuntimeError: weights are shy today (own_models.py, line ...). Correct",
    ),
    (
        f"{PYTHON}:Model --data.packing best_fit",
        "data.packing: expected 'none' or 'split' with model.kind 'python', ... found \"best_fit\"; set data.packing =",
    ),
    (f"{PYTHON}:Model --data.document_mask true", "data.document_mask: expected false with model.kind 'python'"),
    (f"{PYTHON}:Model --model.vocab_size 100", "model.vocab_size: expected at least the tokenizer's 256, found 100"),
    (f"{PYTHON}:Model --parallel.tensor 2 --nproc 2", "parallel.tensor: expected 1 with model.kind 'python', found 2"),
]  # fmt: skip

#: Whole commands, and the error. "done" is a run of two steps, "unsaved" one without checkpoints.
COMMANDS: list[tuple[str, str]] = [
    ("trian tiny.toml", "unknown command trian; did you mean train?"),
    ("train", "train: expected CONFIG.toml or --resume RUN, found neither"),
    (
        "train nowhere.toml",
        "nowhere.toml: expected a configuration file, found nothing there (FOLDER/nowhere.toml); that folder has forei",
    ),
    ("train texts", "texts: expected a configuration file, found a folder"),
    ("train sound.jsonl", "sound.jsonl: expected TOML: ... (at line 1, column 1)"),
    (
        "train tiny.toml --run.dir done",
        "run.dir: ... found one in done; continue it with --resume done, or set another folder",
    ),
    (
        "train tiny.toml --run.dir unsaved",
        "found one in unsaved, which has saved nothing; add --continue to start it again there, or set another fol",
    ),
    ("train --resume nowhere", "--resume: expected the folder of a run, found no such folder at nowhere"),
    (
        "train --resume done --train.steps 4 --run.dir other",
        "run.dir: expected none with --resume done, which continues in that folder, found other; leave --run.dir out",
    ),
    ("train --resume cut --train.steps 4", "cut/checkpoints: ... found only damaged ones (step-2: ...); restore one o"),
    (
        "train --resume done",
        "train.steps: expected more than 2, the steps that done already has, ...; set more steps to continue",
    ),
    (f"train --resume done {ENGINE} --nproc 2 --train.steps 1", "train.steps: expected more than 2, the steps that d"),
    (
        f"train --resume done {ENGINE} --nproc 3 --train.steps 4",
        "train.global_batch: expected a multiple of 3 ranks ... which a resume cannot change; what fits: 1 or 2 or 4",
    ),
    (
        "train --resume done --data.source sound.jsonl",
        "expected data.source = FOLDER/sound.txt as in done, ... start a new run",
    ),
    (
        "train --resume done --data.packing best_fit",
        "expected data.packing = split as in done, found best_fit; start a new run",
    ),
    (
        "train --resume done --data.chat_template sound.txt",
        "expected data.chat_template = none as in done, found FOLDER/sound.txt; start a new run",
    ),
    (
        "train --resume done --model.dim 64",
        "--resume: expected model.dim = 32 as in done, found 64; start a new run for that",
    ),
    (
        "train --resume changed --train.steps 4",
        "--resume: ...changed.txt no longer begins with the 1 document on ... found other tokens: ... start a new run",
    ),
    (
        "train --resume unsaved --train.steps 4",
        "found none; the run has saved nothing; start it again with: ... CONFIG.toml --run.dir unsaved --continue",
    ),
    ("export unsaved out", "unsaved/checkpoints: expected a whole checkpoint, found none; the run has saved nothing"),
    ("export done texts", "export: expected a new folder, found that texts exists; choose another name"),
    ("export texts out", "texts: expected the folder of a run, found no run.json in it"),
    ("export done out --step 7", "--step: expected a step with a checkpoint in done/checkpoints (2), found 7"),
    ("export done out --max-shard-size 5GiBs", '--max-shard-size must be bytes, ... "5 GB" ..., got \'5GiBs\''),
    ("export done out --dtype fp16", "--dtype: invalid choice: 'fp16' (choose from"),
    (
        "export done closed/out",
        "closed/out: cannot write: Permission denied; ... Choose a folder in which you may write",
    ),
    ("generate unsaved --prompt x", "unsaved/checkpoints: expected a whole checkpoint, found none"),
    ("generate sound.txt --prompt x", "sound.txt: expected the folder of a run, found a file; give the folder, such a"),
    ("generate done --prompt x --temperature nan", "argument --temperature: expected a number >= 0, found 'nan'"),
    (
        "generate diverged --prompt x",
        "expected finite logits, found ...: the training has diverged. Use a checkpoint of an earlier step, or",
    ),
    ("export done/config.toml out", "done/config.toml: expected the folder of a run, found a file; give the folder"),
    ("export done out --step two", "argument --step: expected an integer >= 0, found 'two'"),
    ("export --adapters done out", '--adapters: expected a run with finetune.method "lora" or "dora", found "full"'),
    ("compare done nowhere", "nowhere: expected the folder of a run, found no such folder"),
    ("compare done", "compare: expected two runs or more, found 1"),
    ("compare done sound.txt", "sound.txt: expected the folder of a run, found a file; give the folder, such as runs/"),
    ("compare done stepless", "stepless/metrics.jsonl: cannot read the metrics: No such file or directory; restore th"),
    ("compare done damaged", "damaged/run.json: cannot read the record of the run: ...; the file is damaged: restore"),
    ("reprot done", "unknown command reprot; did you mean report?"),
]  # fmt: skip


def commands() -> Iterator[tuple[str, str, str]]:
    """Each case: the content of wrong.toml, the command, the error."""
    for text, error in FILES:
        yield text, "train wrong.toml --run.dir run", error
    for job, cases in (("tiny", OPTIONS), ("foreign", MODELS)):
        for options, error in cases:
            folder = "" if "--run.dir" in options else "--run.dir run"
            yield "", f"train {job}.toml {folder} {options}", error
    for source, error in DATA:
        yield "", f"train tiny.toml --run.dir run --data.source {shlex.quote(source)}", error
    for command, error in COMMANDS:
        yield "", command, error


CASES = list(commands())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder of all cases; files are not to change in it."""
    folder, before, path = tmp_path_factory.mktemp("wrong"), os.getcwd(), list(sys.path)
    make_data(folder)
    make_models(folder)
    (folder / "tiny.toml").write_text(TINY)
    (folder / "foreign.toml").write_text(JOB)
    with hub(tmp_path_factory.mktemp("hub")) as (address, _), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", address)
        patch.setattr(lines, "LONGEST_LINE", 1 << 16)
        os.chdir(folder)
        job = "train tiny.toml --run.dir done --train.steps 2 --data.source sound.txt"
        assert cli.main(job.split()) == 0
        diverged = "--run.dir diverged --train.steps 1 --optimizer.lr 1e10 --validation.every 0"
        assert cli.main(["train", "tiny.toml", *diverged.split(), "--data.source", "sound.txt"]) == 0
        for name in ("cut", "stepless", "damaged"):
            shutil.copytree("done", name)
        for part in Path("cut").glob("checkpoints/*/*.distcp"):
            os.truncate(part, 100)
        os.remove("stepless/metrics.jsonl")
        os.truncate("damaged/run.json", 100)
        shutil.copytree("done", "unsaved")
        shutil.rmtree("unsaved/checkpoints")
        shutil.copytree("done", "changed")
        config = Path("changed/config.toml")
        config.write_text(config.read_text().replace("sound.txt", "changed.txt"))
        Path("changed.txt").write_text("another text\n" * 900)
        yield folder
        os.chdir(before)
        sys.path[:] = path


def pattern_of(error: str, folder: Path) -> str:
    """A regular expression for an error of the lists above."""
    return ".*".join(re.escape(part) for part in error.replace("FOLDER", str(folder)).split("..."))


def test_there_are_enough_cases() -> None:
    assert len(CASES) > 200 and len({(text, command) for text, command, _ in CASES}) == len(CASES)


@pytest.mark.extensive("hundreds of mistakes", but=("*[05]",))
@pytest.mark.parametrize(("text", "command", "error"), CASES, ids=[f"{n}" for n in range(len(CASES))])
def test_one_line_names_the_thing_and_the_fix(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, command: str, error: str
) -> None:
    shutil.rmtree(folder / "run", ignore_errors=True)  # of a case that failed
    (folder / "wrong.toml").write_text(text)
    before = state_of(folder)
    capsys.readouterr()
    with as_a_user():
        status = cli.main(shlex.split(command))
    out, shown = capsys.readouterr()
    assert re.search(pattern_of(error, folder), shown), shown
    assert status == 2 and shown.startswith("error: ") and shown.count("\n") == 1, shown
    assert "Traceback" not in out + shown and "step 1/" not in out
    assert not dist.is_initialized() and torch._dynamo.eval_frame._stance.stance == "default"
    assert state_of(folder) == before


#: A wrong command, and the options that its error advises to set.
ADVICE: list[tuple[str, str]] = [
    (f"foreign {PYTHON}:Model --data.packing best_fit", '--data.packing none --data.document_mask "auto"'),
    (f"foreign {PYTHON}:Model --data.packing best_fit", "--data.packing split --data.document_mask false"),
    (f"foreign {PYTHON}:Model --data.document_mask true", '--data.packing none --data.document_mask "auto"'),
    (f"foreign {PYTHON}:Model --data.document_mask true", "--data.packing split --data.document_mask false"),
    (f"foreign {HF} mamba --data.packing best_fit", '--data.packing none --data.document_mask "auto"'),
    (f"foreign {HF} mamba --data.packing best_fit", "--data.packing split --data.document_mask false"),
    (f"foreign {HF} llama-weightless", "--model.weights random"),
    (f"foreign {HF} llama --finetune.method lora", "--finetune.rank 8"),
    (
        f"foreign {HF} llama --finetune.method lora --finetune.rank 4 --finetune.targets '[\"model.norm\"]'",
        "--finetune.targets [] --finetune.train_also '[\"model.norm.*\"]'",
    ),
    ("tiny --data.packing best_fit --data.document_mask false", "--data.document_mask auto"),
    ("tiny --data.packing best_fit --data.document_mask false", "--data.packing split"),
    (
        "tiny --parallel.engine ddp --parallel.reshard_after_forward 2",
        "--parallel.reshard_after_forward default",
    ),
    (f"tiny {ENGINE} --parallel.strategy hsdp", "--parallel.strategy zero3"),
    (f"tiny {ENGINE} --parallel.strategy zero2 --parallel.memory max_pool", "--parallel.memory arena"),
    (f"tiny {ENGINE} --parallel.grad_dtype bfloat16", "--optimizer.name adamw8bit"),
    (f"tiny {ENGINE} --optimizer.in_backward true", "--train.max_norm 0"),
    ("tiny --parallel.engine fsdp2 --optimizer.name muon", "--optimizer.name adamw"),
    ("tiny --parallel.engine fsdp1 --train.compile inductor", "--train.compile none"),
    ("tiny --activations.checkpoint budget", "--activations.checkpoint ops"),
    ("tiny --activations.offload inputs", "--activations.checkpoint full"),
    ("tiny --finetune.method dora --finetune.dropout 0.1", "--finetune.method lora"),
    ("tiny --data.validation_fraction 0", "--validation.every 0"),
    ("tiny --data.validation_fraction 0", "--data.validation_source sound.txt"),
    ("tiny --data.source short.jsonl --train.seq_len 16", "--validation.every 0"),
    ("tiny --data.source short.jsonl --train.seq_len 16", "--data.validation_fraction 0.5"),
]


@pytest.mark.extensive("each piece of advice trains", but=("[05]",))
@pytest.mark.parametrize(("command", "advice"), ADVICE, ids=[f"{n}" for n in range(len(ADVICE))])
def test_the_advice_of_an_error_works(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, advice: str
) -> None:
    """The settings that the error names lead to a run, not to another error."""
    if not Path("mamba").exists():
        folder_with("mamba", folder / "mamba")
    shutil.rmtree("run", ignore_errors=True)
    job, _, options = command.partition(" ")
    wrong = shlex.split(f"train {job}.toml --run.dir run --train.steps 1 {options}")
    assert cli.main(wrong) == 2
    shown = capsys.readouterr().err
    assert all(key.rpartition(".")[2] in shown for key in re.findall(r"--(\S+)", advice)), shown
    assert cli.main([*wrong, *shlex.split(advice)]) == 0, capsys.readouterr().err
    shutil.rmtree("run")


def test_a_run_that_diverges_ends_without_a_sample(folder: Path) -> None:
    assert "(none: expected finite logits" in Path("diverged/summary.txt").read_text()
    assert '"status": "finished"' in Path("diverged/run.json").read_text()


def test_a_process_ends_with_status_2(folder: Path) -> None:
    before = state_of(folder)
    status, out, shown = run("train", "tiny.toml", "--run.dir", "run", "--data.source", "cut.jsonl")
    # A slow machine is patient in words on the output.
    assert status == 2 and "error" not in out and "line 200 of" in shown and "Traceback" not in shown
    assert shown.splitlines()[-1].startswith("error: ") and shown.count("error: ") == 1
    assert state_of(folder) == before


@pytest.mark.extensive("jobs of several ranks; one mistake of all ranks is in test_failures")
def test_several_ranks_say_it_once(folder: Path) -> None:
    """A model that fails when it runs: after the ranks have met."""
    before = state_of(folder)
    options = shlex.split(f"{PYTHON}:Failing --nproc 2 --run.dir run")
    status, _, shown = run("train", "foreign.toml", *options)
    (line,) = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert status == 2 and "weights are shy today (own_models.py, line" in line and "Traceback" not in shown
    assert shown.count("shy") == 1 and state_of(folder) == before


@pytest.mark.extensive("another job of two ranks")
def test_what_one_rank_alone_finds_names_the_rank(folder: Path, tmp_path: Path) -> None:
    for rank, source in enumerate(("sound", "cut")):
        (tmp_path / f"{rank}").mkdir()
        shutil.copy(folder / f"{source}.jsonl", tmp_path / f"{rank}" / "rows.jsonl")
    options = (
        "--parallel.engine",
        "shardwright",
        "--data.source",
        "rows.jsonl",
        "--run.dir",
        tmp_path / "run",
    )
    folders = [tmp_path / "0", tmp_path / "1"]
    ended = ranks(2, "train", folder / "tiny.toml", *options, folders=folders)
    assert [status for status, _ in ended] == [2, 2]
    shown = "".join(text for _, text in ended)
    assert shown.count("error: ") == 1 and re.search(r"rank 1\b.*line 200 of \S*/1/rows\.jsonl", shown), shown
    assert not (tmp_path / "run").exists()
