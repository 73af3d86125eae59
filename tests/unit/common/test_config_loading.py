"""Loading a config: what is accepted, and how each mistake is named."""

import json
import math
from pathlib import Path

import pytest

from common.config.loading import OVERRIDE, dump_yaml, key_paths, load_config, load_either, load_yaml
from common.config.schema import Config, EngineConfig, RolloutConfig, SftConfig
from common.errors import EXIT_USAGE, ConfigError, UsageError

MINIMAL = """
run: {name: demo, dir: runs/demo, steps: 10}
model: {path: some/model}
tasks: {environment: addition, dataset: train.jsonl}
"""
SFT = """
run: {name: warm, dir: runs/warm, steps: 10}
model: {path: some/model}
tasks: {dataset: sft.jsonl}
"""


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str, name: str = "job.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return _write


def error_of(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value


def test_missing_keys_take_their_defaults_and_an_exponent_without_a_dot_is_a_number(write):
    config = load_config(write(MINIMAL))
    assert config == Config(run=config.run, model=config.model, tasks=config.tasks)
    assert config.run.steps == 10
    config = load_config(write(MINIMAL + "learner: {optimizer: {lr: 3e-4, eps: 1E-6}}"))
    assert config.learner.optimizer.lr == 3e-4
    assert config.learner.optimizer.eps == 1e-6
    config = load_config(write(MINIMAL), ["learner.optimizer.lr=1e-7", "tasks.options.limit=3", "run.name=on"])
    assert load_config(write(dump_yaml(config), "again.yaml")) == config, "a dumped config reads back equal"
    assert config.run.name == "on"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("run.steps=25", "run.steps", 25),
        ("run.name=2026", "run.name", "2026"),
        ("run.name=null", "run.name", "null"),
        ("staleness.max=0", "staleness.max", 0),
        ("learner.dynamic_sampling=false", "learner.dynamic_sampling", False),
        ("rollout.temperature=1", "rollout.temperature", 1.0),
        ("evaluation.datasets=[a.jsonl]", "evaluation.datasets", ["a.jsonl"]),
        ("learner.loss.reference=null", "learner.loss.reference", None),
        ("learner.parallel={tensor: 2}", "learner.parallel.tensor", 2),
        ("tasks.options.prompt=a=b", "tasks.options", {"prompt": "a=b"}),
    ],
)
def test_override_is_typed_by_yaml_and_schema(write, override, key, value):
    found: object = load_config(write(MINIMAL), ["run.steps=1", override])  # the later one wins
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "key", "expected", "found", "hint"),
    [
        ("rum: 1", "rum", "known key", "'rum'", "did you mean 'run'?"),
        ("learner: {paralel: {}}", "learner.paralel", "known key", "'paralel'", "did you mean 'parallel'?"),
        ("learner: {parallel: {tensr: 2}}", "learner.parallel.tensr", "known key", "tensr", "did you mean 'tensor'?"),
        ("model: {path: m, group_size: 4}", "model.group_size", "known key", "group_size", "'rollout.group_size'"),
        ("rollout: {zzz: 1}", "rollout.zzz", "known key", "zzz", "known keys here: nodes, group_size"),
        ("rollout: {group_size: many}", "rollout.group_size", "an integer >= 1", "'many' (text)", ""),
        ("rollout: {group_size: 2.5}", "rollout.group_size", "an integer >= 1", "2.5 (number)", ""),
        ("rollout: {group_size: true}", "rollout.group_size", "an integer >= 1", "true", ""),
        ("rollout: {group_size: 0}", "rollout.group_size", "an integer >= 1", "0 (integer)", ""),
        ("rollout: {temperature: 0}", "rollout.temperature", "a number > 0", "0", ""),
        ("rollout: {top_p: 1.5}", "rollout.top_p", "> 0 and <= 1", "1.5", ""),
        ("learner: {optimizer: {beta2: 1}}", "learner.optimizer.beta2", "a number >= 0 and < 1", "1", ""),
        ("learner: {critic: {optimizer: {beta1: 1.0}}}", "learner.critic.optimizer.beta1", "and < 1", "1.0", ""),
        ("learner: {lora: {rank: 4, dropout: 1}}", "learner.lora.dropout", "a number >= 0 and < 1", "1", ""),
        ("rollout: {temperature: .inf}", "rollout.temperature", "a number > 0", "inf", ""),
        (f"rollout: {{nodes: {10**20}}}", "rollout.nodes", "an integer >= ", "0000 (integer)", "at most 9007"),
        (f"run: {{steps: 0x{'f' * 5000}}}", "run.steps", "an integer >= 1", "20000 bits", "at most 9007"),
        (f"rollout: {{top_p: {10**400}}}", "rollout.top_p", "a number > 0", "of 1329 bits", "at most 9007"),
        ("rollout: {sample_timeout_s: 1.0e+10}", "rollout.sample_timeout_s", "> 0 and <= 1e+09", "1000000", ""),
        ("rollout: {temperature: .nan}", "rollout.temperature", "a number > 0", "nan", ""),
        (
            "weights: {kv_cache: kep}",
            "weights.kv_cache",
            "one of keep, keep_episode, recompute",
            "'kep'",
            "did you mean 'keep'?",
        ),
        (
            "model: {path: m, dtype: float16}",
            "model.dtype",
            "bfloat16, float32",
            "'float16'",
            "float16 training is refused",
        ),
        ("model: {path: m, dtype: half}", "model.dtype", "one of", "'half'", "bfloat16 costs the same"),
        ("model: {path: m, dtype: fp8}", "model.dtype", "one of", "'fp8'", "FP8 training is refused: no test"),
        ("model: {path: m, dtype: float8_e4m3fn}", "model.dtype", "one of", "'float8", "FP8 training is refused"),
        ("model: {path: m, dtype: bfloat}", "model.dtype", "one of", "'bfloat'", "did you mean 'bfloat16'?"),
        ("staleness: {expired: drop}", "staleness.expired", "one of mask, regenerate, wait", "'drop'", ""),
        ("rollout: 3", "rollout", "a section with the keys nodes, group_size", "3 (integer)", ""),
        ("rollout: [1]", "rollout", "a section", "a list", ""),
        ("rollout: {group_size: }", "rollout.group_size", "an integer >= 1", "nothing", ""),
        ("run: {name: '', dir: x, steps: 1}", "run.name", "text", "''", ""),
        ("run: {name: x, dir: y}", "run.steps", "an integer >= 1", "nothing", "required"),
        ("tasks: {environment: e, dataset: d, options: {a: [1]}}", "tasks.options.a", "text or", "a list", ""),
        ("tasks: {environment: e, dataset: d, options: 3}", "tasks.options", "a mapping", "3", ""),
        ("tasks: {dataset: d}\nrollout: {}", "tasks", "environment or a reward", "neither", "docs/rewards.md"),
        ("tasks: {environment: e, dataset: d, reward: r}", "tasks.reward", "nothing beside", "both", ""),
        (
            "tasks: {reward: r, dataset: d, chat_template_kwargs: {enable_thinking: false, tokenize: true}}",
            "tasks.chat_template_kwargs",
            "variables of the chat template",
            "'tokenize'",
            "argument of the tokenizer",
        ),
        ("tasks: {environment: e, dataset: d, prompt: p}", "tasks.prompt", "nothing beside", "both", ""),
        ("tasks: {dataset: d, rewards: r}\nrollout: {}", "tasks.rewards", "known key", "rewards", "'reward'"),
        ("tasks: {dataset: d, reward: []}", "tasks.reward", "at least one", "none", ""),
        ("tasks: {dataset: d, reward: r, prompt: {q}}", "tasks.prompt", "text or", "a section", "put quotes around"),
        ("tasks: {dataset: d, reward: 3}", "tasks.reward", "text or", "3", ""),
        ("tasks: {dataset: d, reward: [r]}", "tasks.reward[0]", "a section", "'r'", ""),
        ("tasks: {dataset: d, reward: [{weight: 1}]}", "tasks.reward[0]", "function", "neither", ""),
        ("tasks: {dataset: d, reward: [{function: r, wieght: 1}]}", "tasks.reward[0].wieght", "known", "", "'weight'"),
        ("tasks: {dataset: d, reward: [{function: r, weight: .nan}]}", "tasks.reward[0].weight", "a number", "nan", ""),
        ("tasks: {dataset: d, reward: [{function: r, weight: .inf}]}", "tasks.reward[0].weight", "a number", "inf", ""),
        ("tasks: {dataset: d, reward: [{function: r, weight: 0}]}", "tasks.reward", "not 0", "none", ""),
        ("tasks: {dataset: d, reward: [{function: r, weight: {a: 0}}]}", "tasks.reward", "not 0", "none", ""),
        ("tasks: {dataset: d, reward: [{function: r}], options: {a: 1}}", "tasks.options", "nothing", "a", "reward[]"),
        ("tasks: {dataset: d, reward: r, agents: {a: {}}}", "tasks.agents", "an agent", "a reward", "docs/agents.md"),
        ("tasks: {dataset: d, environment: e, agents: {a: {x: 1}}}", "tasks.agents.a.x", "known", "x", ""),
        ("tasks: {dataset: d, environment: e, agents: {a b: {}}}", "tasks.agents.a b", "a-z", "a b", ""),
        ("tasks: {dataset: d, reward: r, prompt: []}", "tasks.prompt", "at least one", "none", ""),
        ("tasks: {dataset: d, reward: r, prompt: [{role: me, content: c}]}", "tasks.prompt[0].role", "user", "me", ""),
        ("tasks: {dataset: d, reward: r, truncated: mask}", "tasks.truncated", "masked", "mask", "'masked'"),
        ("learner: {loss: {objective: sapp}}", "learner.loss.objective", "'module:function'", "sapp", "'sapo'"),
        ("learner: {loss: {kl_stop: 1000}}", "learner.loss.kl_stop", "a number > 0 and < 10", "1000", ""),
        ("learner: {loss: {objective: 'm:'}}", "learner.loss.objective", "one of ppo_clip, cispo", "'m:'", ""),
        ("learner: {loss: {advantage: grpoo}}", "learner.loss.advantage", "pass_at_k", "grpoo", "'grpo'"),
        ("learner: {loss: {kl_estimator: 3}}", "learner.loss.kl_estimator", "one of k1, k2, k3", "3", ""),
        (
            "tasks: {dataset: d, reward: r, overlong_buffer_tokens: 4}",
            "tasks.overlong_buffer_tokens",
            "tasks.truncated: penalized",
            "counted",
            "",
        ),
    ],
)
def test_error_names_key_expected_found_and_hint(write, text, key, expected, found, hint):
    section = text.partition(":")[0]
    kept = "\n".join(line for line in MINIMAL.splitlines() if not line.startswith(f"{section}:"))
    path = write(f"{kept}\n{text}\n")
    error = error_of(path)
    assert (error.file, error.key) == (str(path), key)
    assert expected in error.expected
    assert found in error.found
    assert hint in (error.hint or "")
    assert error.exit_code == EXIT_USAGE
    assert str(path) in str(error)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("learner:\n  parallel:\n    tensr: 2", 7),
        ("learner: {parallel:\n  {tensr: 2}}", 6),
        ("rollout:\n\n  # samples\n  group_size: many", 8),
        ("evaluations: {}", 5),
    ],
)
def test_a_wrong_key_is_named_with_its_line(write, text, line):
    path = write(MINIMAL + text)
    error = error_of(path)
    assert error.line == line
    assert str(error).startswith(f"{path}, line {line}: {error.key}: expected ")
    assert error_of(path, "run.stepz=1").line is None


@pytest.mark.parametrize(
    ("rule", "line", "key", "expected", "found", "hint"),
    [
        ("metric: rewrd_mean\n  below: 1", 7, "metric", "one number", "'rewrd_mean'", "did you mean 'reward_mean'?"),
        ("below: 1\n  metric: mismatch_by_age", 8, "metric", "one number", "'mismatch_by_age'", "'mismatch_abs_mean'"),
        ("metric: loss\n  belov: 1", 8, "belov", "a known key", "unknown key 'belov'", "did you mean 'below'?"),
        ("metric: loss\n  above: 1\n  do: stpo", 9, "do", "one of", "'stpo'", "did you mean 'stop'?"),
        ("metric: loss\n  above: 1\n  do: run", 7, "command", "the words of a command", "nothing", ""),
        ("metric: loss\n  above: 1\n  command: [ls]", 7, "do", "run, for a rule with a command", "'warn'", ""),
        ("metric: loss\n  above: 1\n  do: run\n  command: [ls, 3]", 10, "command[1]", "text", "3 (integer)", ""),
        ("metric: loss\n  steps: 0", 8, "steps", "an integer >= 1", "0 (integer)", ""),
        ("below: 1", 7, "metric", "text", "nothing", "this key is required"),
        ("metric: loss", 7, "", "exactly one of below, above, drops, spikes", "none of them", ""),
        ("metric: loss\n  below: 1\n  spikes: 3", 7, "", "exactly one of", "below and spikes", ""),
        ("3", 7, "", "a section with the keys metric, below", "3 (integer)", ""),
    ],
)
def test_a_wrong_watch_rule_is_named_with_its_place_in_the_list_and_its_line(
    write, rule, line, key, expected, found, hint
):
    error = error_of(write(f"{MINIMAL}watch:\n- {{metric: reward_mean, drops: 0.5}}\n- {rule}\n"))
    assert (error.key, error.line) == (f"watch[1].{key}".removesuffix("."), line)
    assert expected in error.expected and found in error.found and hint in (error.hint or "")
    assert error.exit_code == EXIT_USAGE


def test_watch_rules_can_be_overridden_as_a_whole(write):
    path = write(MINIMAL + "watch: [{metric: rewrd, below: 1}]")
    assert load_config(path, ["watch=[]"]).watch == []
    (rule,) = load_config(path, ["watch=[{metric: environment/solved, below: 0.1, do: stop}]"]).watch
    assert (rule.metric, rule.below, rule.do) == ("environment/solved", 0.1, "stop")
    error = error_of(path, "watch=[{metric: los, below: 1}]")
    assert (error.file, error.key) == (OVERRIDE, "watch[0].metric") and "'loss'" in (error.hint or "")
    with pytest.raises(UsageError) as refused:
        load_config(path, ["watch[0].metric=loss"])
    assert "'watch[0].metric=loss'" in str(refused.value)


def test_an_entry_of_any_list_is_named(write):
    error = error_of(write(MINIMAL + "telemetry:\n  sinks:\n  - wandb\n  - tensorbord\n"))
    assert (error.key, error.line) == ("telemetry.sinks[1]", 8) and "'tensorboard'" in (error.hint or "")
    assert error_of(write(MINIMAL + "broker: {address: [a, 3]}")).key == "broker.address[1]"
    assert "a list of sections" in error_of(write(MINIMAL + "watch: 3")).expected


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        ("run: {name: a\nmodel: }{", "line 2", "expected"),
        ("run:\n  name: a\n  name: b\n", "line 3", "'name' stands twice"),
        ("run: [1, 2\n", "line 2", ""),
        ("1: 2\n", "line 1", "not text"),
        ("a: &x 1\nb: !!python/object:os.system {}\n", "line 2", "could not determine a constructor"),
        ("just text\n", "the document", "str"),
        ("", "the document", "nothing"),
    ],
)
def test_malformed_document_is_refused_with_its_line(write, text, where, problem):
    error = error_of(write(text))
    assert where in error.key
    assert problem in error.found


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("tasks.prompt", "Solve {question}. Give the number after ####."),
        ("tasks.prompt", "{question} # {hint}"),
        ("tasks.prompt", "Solve it.\n\n{question}"),
        ("tasks.prompt", "# {question}"),
        ("tasks.prompt", "no"),
        ("run.dir", "/data/run #3"),
        ("run.name", "010"),
        ("model.dtype", "bfloat16"),
    ],
)
def test_a_text_of_the_command_line_is_taken_whole_without_quotes(write, key, text):
    path = write(MINIMAL.replace("environment: addition", "reward: exact_match"))
    section, _, name = key.partition(".")
    for word, expected in ((text, text), (json.dumps(text), text), (f"'{text}' # comment", text)):
        if "\n" not in text or "'" not in word:
            assert getattr(getattr(load_config(path, [f"{key}={word}"]), section), name) == expected


def test_a_mapping_of_the_command_line_stays_one_where_the_key_takes_it(write):
    words = ["scorers.g.url=http://h/v1", "scorers.g.model=m", "scorers.g.kind=rubric", "scorers.g.prompt={completion}"]
    words += ["tasks.reward=[{scorer: g}]", "tasks.environment=null", "scorers.g.verdict={(good): 1, bad: 0}"]
    assert load_config(write(MINIMAL), words).scorers["g"].verdict == {"(good)": 1.0, "bad": 0.0}


def test_numbers_that_yaml_reads_in_base_8_or_60_are_refused_and_others_keep_their_value(write):
    for word in ("010", "00", "1:30"):
        error = error_of(write(MINIMAL), f"run.seed={word}")
        assert (error.key, error.found) == ("run.seed", f"{word!r} (text)")
        assert error_of(write(MINIMAL.replace("steps: 10", f"steps: {word}"))).found == f"{word!r} (text)"
    read = {"0": 0, "0x10": 16, "0b11": 3, "1_000": 1000, "-5": -5, "1.": 1.0, ".5": 0.5, "1.5e+3": 1500.0, "1e5": 1e5}
    assert {word: load_yaml(word) for word in read} == read
    assert load_yaml("[.inf, -.inf]") == [math.inf, -math.inf]


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("rollout.groupsize=4", "rollout.groupsize", "did you mean 'group_size'?"),
        ("run.steps=soon", "run.steps", "an integer >= 1"),
        ("learner.parallel={tensor: 0}", "learner.parallel.tensor", "an integer >= 1"),
        ("run.steps.more=1", "run.steps.more", ""),
        ("tasks.options={a: ", "tasks.options", "a YAML value"),
    ],
)
def test_a_wrong_override_is_blamed_and_not_the_file(write, override, key, expected):
    error = error_of(write(MINIMAL), override)
    assert (error.file, error.key) == (OVERRIDE, key)
    assert expected in str(error)


def test_an_override_changes_its_own_key_where_an_alias_repeats_a_section(write):
    learner = "learner: {optimizer: &adam {lr: 1e-6}, critic: {optimizer: *adam}, loss: {advantage: gae}}"
    path = write(MINIMAL + learner)
    for key, lrs in (("critic.optimizer", [1e-6, 1e-4]), ("optimizer", [1e-4, 1e-6])):
        changed = load_config(path, [f"learner.{key}.lr=1e-4"]).learner
        assert changed.critic is not None
        assert [changed.optimizer.lr, changed.critic.optimizer.lr] == lrs


def test_override_without_key_and_value_is_a_usage_error(write):
    for word in ("run.steps", "=3", ".a=3", "run..steps=3"):
        with pytest.raises(UsageError) as refused:
            load_config(write(MINIMAL), [word])
        assert repr(word) in str(refused.value), "the words are blamed, and not a key"


def test_what_is_no_file_of_text_is_refused_and_a_missing_one_names_the_nearest(write, tmp_path):
    path = write(MINIMAL, "quickstart.yaml")
    wrong = path.with_name("quikstart.yaml")
    with pytest.raises(UsageError) as refused:
        load_config(wrong)
    assert str(wrong) in str(refused.value) and str(path) in str(refused.value)
    with pytest.raises(UsageError) as refused:
        load_config(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path} is")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError) as refused:
        load_config(path)
    assert str(path) in str(refused.value) and "'utf-8'" in str(refused.value)


def test_warm_start_config_is_recognised(write):
    path = write(SFT)
    assert isinstance(load_either(path), SftConfig)
    assert isinstance(load_either(write(MINIMAL, "rl.yaml")), Config)
    with pytest.raises(UsageError) as refused:
        load_config(path)
    assert str(path) in str(refused.value) and "`slipstream sft`" in str(refused.value)


def test_schema_stays_within_its_budget_of_keys():
    leaves = [p for p in key_paths(Config) if not any(q.startswith(p + ".") for q in key_paths(Config))]
    assert len(leaves) == len(set(leaves))
    assert len(leaves) <= 201


@pytest.mark.parametrize(
    ("text", "key", "found"),
    [
        ('"foo[x]": 1', "foo[x]", "unknown key 'foo[x]'"),
        ('"a.b[": 1', "a.b[", "unknown key 'a.b['"),
        ('"": 1', "''", "unknown key ''"),
        ('scorers: {"a.b": {model: 1}}', "scorers", "'a.b', whose value: Expected `str`"),
        ('scorers: {"[...]": {model: 1}}', "scorers", "'[...]', whose value: Expected `str`"),
        ('evaluation: {datasets: {"a[0]": 3}}', "evaluation.datasets", "'a[0]', whose value: Expected `array`"),
    ],
)
def test_a_name_with_points_or_brackets_is_blamed_on_its_section(write, text, key, found):
    path = write(f"{MINIMAL}\n{text}\n")
    error = error_of(path)
    assert (error.file, error.key) == (str(path), key) and found in error.found


@pytest.mark.parametrize("value", ["2026-13-45", "9" * 5000, "[" * 1000, '"\\ud800"'])
def test_a_value_that_there_is_not_is_bad_yaml_and_no_traceback(write, value):
    blamed = error_of(write(MINIMAL), f"run.name={value}")
    assert (blamed.file, blamed.key, blamed.expected) == (OVERRIDE, "run.name", "a YAML value")
    path = write(f"{MINIMAL}\nweights: {{timeout_s: {value}}}\n")
    blamed = error_of(path)
    assert (blamed.file, blamed.expected) == (str(path), "YAML")


def test_concurrency_is_a_number_or_follows_the_engine() -> None:
    engine = EngineConfig(max_num_seqs=32)
    assert RolloutConfig(concurrency=64, engine=engine).concurrency_bounds == (64, 64)
    assert RolloutConfig(concurrency="auto", group_size=4, engine=engine).concurrency_bounds == (4, 64)
    small = RolloutConfig(concurrency="auto", group_size=4, engine=EngineConfig(max_num_seqs=1))
    assert small.concurrency_bounds == (4, 4)


def test_the_key_of_an_earlier_release_for_held_out_problems_names_the_new_one(write):
    with_key = MINIMAL.replace("dataset:", "eval_dataset: a.jsonl, dataset:", 1)
    for document, overrides in ((MINIMAL, ["tasks.eval_dataset=a.jsonl"]), (with_key, [])):
        error = error_of(write(document), *overrides)
        assert (error.key, error.exit_code) == ("tasks.eval_dataset", EXIT_USAGE)
        assert "evaluation.datasets" in (error.hint or "")
