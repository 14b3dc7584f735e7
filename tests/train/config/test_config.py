"""Configurations: what is read, what is refused, and in which words. Nothing is trained here."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from shardwright.train.config import Config, DataConfig, ModelConfig, TrainConfig, load_config
from shardwright.train.config.keys import OTHER_NAMES, keys, nearest_key
from shardwright.train.config.shapes.presets import PRESETS, RopeScaling
from shardwright.train.errors import UserError

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *overrides: tuple[str, str]) -> str:
    """The message with which a configuration is refused, without the path at its front."""
    path = write(folder, text)
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def test_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, ""))
    assert config == Config()
    assert config.train.steps == 300
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.parallel.engine == "shardwright"


def test_whole_numbers_serve_where_fractions_are_allowed(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "[optimizer]\nlr = 1\nbetas = [0, 0.9]"))
    assert config.optimizer.lr == 1.0
    assert config.optimizer.betas == (0.0, 0.9)


def test_every_key_has_words_for_the_help() -> None:
    found = list(keys())
    assert len({key.path for key in found}) == len(found) > 40
    for key in found:
        assert key.expected and key.default, key.path
        assert key.description.endswith("."), key.path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load(path: Path) -> None:
    config = load_config(path)
    config.train.accumulation_steps(2)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


# ------------------------------------------------------------------------------
# Overrides


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[train]\nsteps = 5\nseq_len = 32")
    config = load_config(path, [("train.steps", "7"), ("optimizer.lr", "1e-4"), ("train.steps", "8")])
    assert (config.train.steps, config.train.seq_len, config.optimizer.lr) == (8, 32, 1e-4)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("run.name", "bare-words", "bare-words"),
        ("run.name", '"quoted"', "quoted"),
        ("run.name", "2026", "2026"),
        ("run.dir", "true", "true"),
        ("run.dir", "", ""),
        ("data.source", "some/file.txt", "some/file.txt"),
        ("data.source", '["a.txt", "b.jsonl"]', ("a.txt", "b.jsonl")),
        ("log.sinks", "[]", ()),
        ("optimizer.betas", "[0.8, 0.99]", (0.8, 0.99)),
    ],
)
def test_overrides_are_toml_values_and_bare_words_are_strings(
    tmp_path: Path, key: str, text: str, value: object
) -> None:
    config = load_config(write(tmp_path, ""), [(key, text)])
    section, name = key.split(".")
    assert getattr(getattr(config, section), name) == value


def test_overrides_reach_into_nested_tables(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, ""), [("model.rope_scaling.factor", "16")])
    assert config.model.shape().rope_scaling == RopeScaling(factor=16.0)


def test_an_override_cannot_smuggle_in_a_second_key(tmp_path: Path) -> None:
    message = refusal(tmp_path, "", ("train.steps", "5\nseq_len = 1"))
    assert message.startswith("command line: train.steps: expected an integer >= 1")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("train.step", "command line: unknown key train.step; did you mean train.steps?"),
        ("train.lr", "command line: unknown key train.lr; did you mean optimizer.lr?"),
        ("trian.steps", "command line: unknown key trian.steps; did you mean train.steps?"),
        ("train.steps.more", "command line: unknown key train.steps.more; did you mean train.steps?"),
        ("no.such", "command line: unknown key no.such; see shardwright train --help"),
    ],
)
def test_unknown_override_is_refused_with_the_nearest_key(tmp_path: Path, key: str, expected: str) -> None:
    assert refusal(tmp_path, "[train]\nsteps = 5", (key, "3")) == expected


# ------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[train]\nstep = 3", "unknown key train.step; did you mean train.steps?"),
        ("[train]\nmax_nrom = 3", "unknown key train.max_nrom; did you mean train.max_norm?"),
        ("[train]\nengine = 'ddp'", "unknown key train.engine; did you mean parallel.engine?"),
        ("[log]\nxyzzy = 3", "unknown key log.xyzzy; the keys of [log] are every, sinks, unit_norms, project"),
        ("steps = 3", "unknown key steps; did you mean train.steps?"),
        ("[trian]\nsteps = 3", "unknown section [trian]; did you mean [train]?"),
        (
            "[model.rope_scaling]\nfactr = 3",
            "unknown key model.rope_scaling.factr; did you mean model.rope_scaling.factor?",
        ),
        ("[train]\nsteps = 'many'", 'train.steps: expected an integer >= 1, found "many" (a string)'),
        ("[train]\nsteps = 3.0", "train.steps: expected an integer >= 1, found 3.0 (a number); write 3"),
        ("[train]\nsteps = true", "train.steps: expected an integer >= 1, found true (a boolean)"),
        ("[train]\nsteps = 0", "train.steps: expected an integer >= 1, found 0 (an integer)"),
        (
            "[train]\nmax_norm = '1'",
            'train.max_norm: expected a number >= 0, found "1" (a string); write it without quotes',
        ),
        ("[optimizer]\nlr = nan", "optimizer.lr: expected a number > 0, found nan (a number)"),
        ("[optimizer]\nlr = 2026-01-01", "optimizer.lr: expected a number > 0, found 2026-01-01 (a date)"),
        (
            '[log]\nsinks = ["paper"]',
            "log.sinks: expected one of tensorboard, wandb, mlflow, trackio, or an import path (package.module:NAME), "
            "found 'paper'",
        ),
        (
            "[optimizer]\nbetas = [0.9]",
            "optimizer.betas: expected a list of 2 numbers >= 0 and < 1, found [0.9] (a list)",
        ),
        (
            "[optimizer]\nbetas = [0.9, 1.0]",
            "optimizer.betas: expected a list of 2 numbers >= 0 and < 1, found 1.0 (a number)",
        ),
        ("[data]\nsource = 3", "data.source: expected a string or a list of strings, found 3 (an integer)"),
        ("[data]\nsource = ''", 'data.source: expected a value that is not empty, found "" (a string)'),
        (
            "[[data.sources]]\npath = 'a.txt'",
            "data.sources.0.weight: expected a number > 0, found none; write weight = 1 in each table for equal "
            "shares",
        ),
        (
            "[[data.sources]]\npath = 'a.txt'\nweight = 1\nkind = 'chats'",
            "data.sources.0.kind: expected one of documents, conversations, completions, found \"chats\" (a string); "
            "did you mean conversations?",
        ),
        ("[data]\nsource = []", "data.source: expected a value that is not empty, found [] (a list)"),
        (
            "[parallel]\nengine = 'fsdp3'",
            "parallel.engine: expected one of shardwright, fsdp2, fsdp1, ddp, none, "
            'found "fsdp3" (a string); did you mean fsdp2?',
        ),
        (
            "[parallel]\nreduce_dtype = 'float16'",
            "parallel.reduce_dtype: expected one of float32, bfloat16, "
            'found "float16" (a string); did you mean bfloat16?',
        ),
        ("train = 3", "train: expected a table ([train]), found 3 (an integer)"),
        ("[model]\nrope_scaling = 3", "model.rope_scaling: expected a table, found 3 (an integer)"),
        (
            "[run]\nname = '../up'",
            "run.name: expected letters, digits, '.', '_' and '-', not starting with '.' or '-', "
            'found "../up" (a string)',
        ),
    ],
)  # fmt: skip
def test_mistake_names_key_expectation_and_finding(tmp_path: Path, text: str, expected: str) -> None:
    assert refusal(tmp_path, text) == expected


def test_mistake_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[train]\nstep = 3")
    with pytest.raises(UserError, match=f"^{path}: unknown key"):
        load_config(path)


def test_mistake_of_an_override_is_blamed_on_the_command_line(tmp_path: Path) -> None:
    message = refusal(tmp_path, "[train]\nsteps = 5", ("train.steps", "many"))
    assert message == 'command line: train.steps: expected an integer >= 1, found "many" (a string)'


def test_further_mistakes_are_counted_and_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, "[train]\nsteps = 0\nseq_len = 'x'\n[log]\nevry = 1")
    assert message == (
        "train.steps: expected an integer >= 1, found 0 (an integer) (and 2 more: train.seq_len, log.evry)"
    )


def test_malformed_toml_names_the_line(tmp_path: Path) -> None:
    assert "line 2" in refusal(tmp_path, "[train]\nsteps = = 3\n")


def test_missing_file_folder_and_other_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="found nothing there"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(UserError, match="found a folder"):
        load_config(tmp_path)
    with pytest.raises(UserError, match="cannot read"):
        load_config(write(tmp_path, "") / "below-a-file.toml")
    path = tmp_path / "latin.toml"
    path.write_bytes(b"[run]\nname = '\xe9'")
    with pytest.raises(UserError, match="expected UTF-8 text, found other bytes at offset 14"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[train]\nseq_len = 4096", "train.seq_len: expected at most model.max_seq_len = 2048, found 4096"),
        (
            "[train]\nmicro_batch = 5",
            "train.micro_batch = 5 (that is 5), found 16; nearest that fit: 15 or 20",
        ),
        (
            "[data]\nvalidation_fraction = 0",
            "validation.every: expected 0, since data.validation_fraction = 0",
        ),
        (
            '[parallel]\nstrategy = "hsdp"',
            "parallel.replicas: expected at least 2 with strategy 'hsdp', found 1",
        ),
        (
            '[parallel]\nengine = "fsdp2"\nlayout = "ragged"',
            "parallel.layout: expected 'per_parameter' with engine",
        ),
        (
            '[parallel]\nstrategy = "zero2"\nreshard_after_forward = "always"',
            "parallel.reshard_after_forward: strategy 'zero2' keeps parameters whole",
        ),
        ("[model]\ndim = 129", "model.dim: expected a multiple of 2 x n_heads = 8"),
        ("[model]\nn_kv_heads = 3", "model.n_kv_heads: expected a divisor of n_heads = 4, found 3"),
        (
            "[model.rope_scaling]\nlow_freq_factor = 5",
            "model.rope_scaling.high_freq_factor: expected more than",
        ),
    ],
)
def test_values_that_do_not_fit_one_another_are_refused(tmp_path: Path, text: str, part: str) -> None:
    assert part in refusal(tmp_path, text)


@pytest.mark.extensive("every name of three other trainers")
def test_names_of_other_trainers_lead_to_keys() -> None:
    paths = {key.path for key in keys()}
    for name, key in OTHER_NAMES.items():
        assert key in paths and name not in {path.rpartition(".")[2] for path in paths}, name
        assert nearest_key(name) == nearest_key(f"train.{name}") == key


def test_keys_of_tables_in_a_list_keep_their_number() -> None:
    assert nearest_key("data.sources.3.wieght") == "data.sources.3.weight"
    assert nearest_key("data.sources.3.packng") == "data.packing"
    assert nearest_key("data.wieght") != "data.sources.N.weight"


def test_nearest_key_prefers_the_same_section() -> None:
    assert nearest_key("validation.evry") == "validation.every"
    assert nearest_key("log.evry") == "log.every"
    assert nearest_key("batches") == "validation.batches"
    assert nearest_key("zzzzzz") is None


# ------------------------------------------------------------------------------
# What follows from a configuration


def test_written_configuration_loads_back_equal(tmp_path: Path) -> None:
    text = """
    [run]
    dir = 'a "quoted" \\ back\u007fslash \u00e9 \U0001f600'
    [model]
    preset = "8B"
    dim = 4096
    tied_embeddings = true
    rope_theta = 1e16
    rope_scaling = { factor = 4, original_max_seq_len = 4096 }
    [data]
    source = ["a.txt", "b c.jsonl"]
    [optimizer]
    lr = 1e-05
    betas = [0, 0.5]
    [log]
    sinks = []
    """
    config = load_config(write(tmp_path, text.replace("\u007f", "")))
    config = config.model_copy(
        update={"run": config.run.model_copy(update={"dir": config.run.dir + "\n\t\u007f"})}
    )
    again = load_config(write(tmp_path, config.to_toml()))
    assert again == config
    assert again.to_toml() == config.to_toml()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("change", [{}, {"rope_scaling": {"factor": 1}}, {"rope_scaling": {}, "n_layers": 2}])
def test_resolved_configuration_names_every_number_and_means_the_same(
    tmp_path: Path, preset: str, change: dict[str, object]
) -> None:
    config = Config.model_validate({"model": {"preset": preset, **change}, "data": {"source": ["a.txt"]}})
    resolved = load_config(write(tmp_path, config.resolved().to_toml()))
    assert resolved == config.resolved() == resolved.resolved()
    assert resolved.model.shape() == config.model.shape()
    assert all(getattr(resolved.model, name) is not None for name in vars(resolved.model.shape()))
    assert resolved.data.source == (str(Path.cwd() / "a.txt"),)
    assert Config().resolved().data.source == "pydoc"


def test_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Config().train.steps = 3  # type: ignore[misc]


def test_accumulation_steps_follow_from_ranks() -> None:
    train = TrainConfig(global_batch=48, micro_batch=4)
    assert [train.accumulation_steps(ranks) for ranks in (1, 2, 3, 4, 6, 12)] == [12, 6, 4, 3, 2, 1]
    with pytest.raises(
        UserError, match=r"5 ranks x train.micro_batch = 4 \(that is 20\), found 48.* 40 or 60"
    ):
        train.accumulation_steps(5)
    with pytest.raises(UserError, match=r"nearest that fit: 64, or train.micro_batch = 3"):
        train.accumulation_steps(16)


def test_advice_on_batches_fits_the_job() -> None:
    """An advised batch is not refused afterwards: for these ranks, and for a resume, whose global batch is fixed."""
    train = TrainConfig(global_batch=8, micro_batch=1)
    problem = train.batch_problem(3, resumes=True)
    assert problem is not None and "12" not in problem
    assert problem.endswith("found 8, which a resume cannot change; what fits: 1 or 2 or 4 or 8 ranks")
    problem = TrainConfig(global_batch=8, micro_batch=3).batch_problem(2, resumes=True)
    assert problem is not None and problem.endswith("what fits: train.micro_batch = 2")
    problem = train.batch_problem(3, tensor=2, resumes=True)
    assert problem is not None and problem.endswith("what fits: 2 or 4 or 8 or 16 ranks")
    values = {"train": {"global_batch": 6, "micro_batch": 4}}
    for context, advice in (
        ({}, "one rank x train.micro_batch = 4 .* fit: 4 or 8"),
        ({"ranks": 2}, "2 ranks x train.micro_batch = 4 .* fit: 8, or train.micro_batch = 3"),
    ):
        with pytest.raises(ValidationError, match=advice):
            Config.model_validate(values, context=context)


def test_model_keys_replace_numbers_of_the_preset() -> None:
    shape = ModelConfig(preset="8B", n_layers=2, vocab_size=300).shape()
    assert (shape.n_layers, shape.vocab_size, shape.dim) == (2, 300, PRESETS["8B"].dim)
    assert shape.rope_scaling == PRESETS["8B"].rope_scaling


def test_a_scaling_factor_of_one_turns_the_scaling_off() -> None:
    config = ModelConfig.model_validate({"preset": "8B", "rope_scaling": {"factor": 1}})
    assert config.shape().rope_scaling is None


def test_data_sections_can_be_built_in_code() -> None:
    assert DataConfig(source=("a.txt",)).source == ("a.txt",)
