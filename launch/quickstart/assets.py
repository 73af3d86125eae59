"""Everything the quickstart starts from: a random model with its tokenizer, problems and demonstrations.

    python -m launch.quickstart.assets --out runs/assets [--seed N] [--preset tiny|long]
    python -m launch.quickstart.assets --check CONFIG [key=value ...]

- OUT/model is a Hugging Face folder: Qwen3 architecture, random weights, character tokenizer.
- OUT/addition has problems in train.jsonl, others in held_out.jsonl, and demonstrations in order in sft.jsonl.
- OUT/number_guessing has the same for the number game. Its held-out problems are all its numbers.
- OUT/assets.json says how they were built. The same request again does nothing.

With --check nothing is built: launch/quickstart.sh refuses bad overrides before minutes of work. The files that CONFIG
names need not be there yet, those that an override names must. The exit code is 0, or 2 after one line on stderr.
"""

import argparse
import dataclasses
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config.checks import problems, resolve_paths
from common.config.loading import load_config
from common.errors import EXIT_DONE, ConfigError, UsageError
from common.process.files import replace_folder
from common.process.run_dir import RunDir
from rollout_fleet.environments.description import check_sources, limit_problems

# ---------------------------------------------------------------- problems and demonstrations
# Addition: `Q: 384+519=? A: 4+9=13, 8+1+1=10, 3+5+1=9 =903`: column sums, least significant first, then the answer.
# The warm start learns clean demonstrations first and then sloppy ones: half of them guess at once, and carries are
# forgotten. So reinforcement learning starts from a policy that can do the task but mostly does not.
#
# Number guessing: a part of the demonstrated games bisects, the rest guesses anywhere.


Row = dict[str, Any]
Pair = tuple[int, int]


@dataclass(frozen=True)
class AdditionPlan:
    """How much addition data, and of what kind.

    Without `median_digits` numbers are drawn uniformly below 10**digits. With it the number of digits is log-normal
    around it, at most `digits`, which gives answers of long-tailed length. Problems and demonstrations are disjoint.
    """

    digits: int = 3
    median_digits: float | None = None
    spread: float = 0.0  # standard deviation of the logarithm of the number of digits
    train: int = 4096
    held_out: int = 512
    clean: int = 19200  # demonstrations
    sloppy: int = 1920  # demonstrations, behind the clean ones
    blurted: float = 0.5  # share of sloppy demonstrations that guess at once
    forgotten: float = 0.3  # probability that a sloppy demonstration forgets a carry


@dataclass(frozen=True)
class GuessingPlan:
    """The number game: numbers 1..highest, `guesses` turns, and how the demonstrated games are played."""

    highest: int = 31
    guesses: int = 5
    games: int = 6400
    bisected: float = 0.3


def addition_pairs(plan: AdditionPlan, rng: random.Random) -> tuple[list[Pair], list[Pair], Iterator[Pair]]:
    """Held-out problems, training problems, and an endless stream of others for demonstrations."""
    problems: dict[Pair, None] = {}
    while len(problems) < plan.held_out + plan.train:
        problems[_draw(plan, rng)] = None
    drawn = list(problems)
    others = (pair for pair in iter(lambda: _draw(plan, rng), None) if pair not in problems)
    return drawn[: plan.held_out], drawn[plan.held_out :], others


def _draw(plan: AdditionPlan, rng: random.Random) -> Pair:
    if plan.median_digits is None:
        return rng.randrange(10**plan.digits), rng.randrange(10**plan.digits)
    drawn = round(plan.median_digits * rng.lognormvariate(0.0, plan.spread))
    digits = min(max(drawn, 2), plan.digits)
    low = 10 ** (digits - 1)
    high = 10**digits
    return rng.randrange(low, high), rng.randrange(low, high)


def addition_problem(pair: Pair) -> Row:
    """The dataset row that rollout_fleet.environments.builtin.addition reads."""
    return {"question": f"{pair[0]}+{pair[1]}", "answer": str(sum(pair))}


def addition_demonstration(pair: Pair, rng: random.Random, blurted: float = 0.0, forgotten: float = 0.0) -> Row:
    """A warm-start row; wrong with the given probabilities."""
    prompt = f"Q: {pair[0]}+{pair[1]}=? A:"
    if rng.random() < blurted:
        return {"prompt": prompt, "completion": f" ={rng.randrange(2 * 10 ** len(str(max(pair))))}"}
    return {"prompt": prompt, "completion": _scratchpad(pair, rng, forgotten)}


def _scratchpad(pair: Pair, rng: random.Random, forgotten: float) -> str:
    columns: list[str] = []
    digits = ""
    carry = 0
    for column in range(len(str(max(pair)))):
        x, y = (number // 10**column % 10 for number in pair)
        if carry and rng.random() < forgotten:
            carry = 0
        total = x + y + carry
        columns.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        digits = str(total % 10) + digits
        carry = total // 10
    if carry and rng.random() >= forgotten:
        digits = "1" + digits
    return f" {', '.join(columns)} ={int(digits)}"


def addition_demonstrations(plan: AdditionPlan, pairs: Iterator[Pair], rng: random.Random) -> Iterator[Row]:
    for _ in range(plan.clean):
        yield addition_demonstration(next(pairs), rng)
    for _ in range(plan.sloppy):
        yield addition_demonstration(next(pairs), rng, plan.blurted, plan.forgotten)


def guessing_demonstrations(plan: GuessingPlan, rng: random.Random) -> Iterator[Row]:
    """Games as segments: [text, 1] is an action to imitate (it ends with the end token), [text, 0] is read only."""
    for _ in range(plan.games):
        yield {"segments": _game(plan, rng.randint(1, plan.highest), rng.random() < plan.bisected, rng)}


def _game(plan: GuessingPlan, number: int, bisect: bool, rng: random.Random) -> list[list[str | int]]:
    low = 1
    high = plan.highest
    segments: list[list[str | int]] = [[f"Guess {low}-{high}\n", 0]]
    for made in range(1, plan.guesses + 1):
        guess = (low + high) // 2 if bisect else rng.randint(1, plan.highest)
        segments.append([str(guess), 1])
        if guess == number or made == plan.guesses:
            break
        if guess < number:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
        segments.append([f" {'higher' if guess < number else 'lower'} {low}-{high}\n", 0])
    return segments


# ---------------------------------------------------------------- model, tokenizer and files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
UNKNOWN = "<unk>"
VOCABULARY = 128
MADE_LATER = ("model.path", "tasks.dataset", "evaluation.datasets")
FORMAT = 1  # raise when what is built changes in a way that the presets do not show


@dataclass(frozen=True)
class Preset:
    """`model` has fields of transformers' Qwen3Config."""

    model: dict[str, Any]
    addition: AdditionPlan
    guessing: GuessingPlan


def dense(hidden: int, intermediate: int, layers: int, heads: int, initializer_range: float) -> dict[str, Any]:
    """The shape of a dense Qwen3 with two query heads for each key-value head."""
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": hidden // heads}
    return sizes | attention | {"max_position_embeddings": 1024, "initializer_range": initializer_range}


LONG_ADDITION = AdditionPlan(digits=34, median_digits=7.2, spread=0.8, clean=38400, sloppy=3200)
PRESETS = {
    # 0.3 M parameters, answers of about 30 tokens
    "tiny": Preset(dense(128, 256, 2, 4, 0.044), AdditionPlan(), GuessingPlan()),
    # 5 M parameters, answers of 92 tokens on average and at most 384
    "long": Preset(dense(256, 1024, 5, 8, 0.03), LONG_ADDITION, GuessingPlan()),
}


def alphabet() -> dict[str, int]:
    """Token to id: three special tokens, newline and printable ASCII, then fillers up to 128."""
    tokens = [*SPECIAL.values(), "\n", *map(chr, range(32, 127)), UNKNOWN]
    tokens += [f"<|{i}|>" for i in range(len(tokens), VOCABULARY)]
    return {token: i for i, token in enumerate(tokens)}


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """One token per character; encode and decode are exact inverses on the alphabet."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(alphabet(), unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token=UNKNOWN, clean_up_tokenization_spaces=False, **SPECIAL
    )


def build_model(shape: Mapping[str, Any], seed: int, folder: Path) -> None:
    """Write a Hugging Face folder: a Qwen3 config with tied embeddings, random float32 weights, tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    ids = alphabet()
    special: dict[str, Any] = {f"{name}_id": ids[token] for name, token in SPECIAL.items()}
    config = Qwen3Config(
        **shape,
        **special,
        vocab_size=VOCABULARY,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).float()
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def write_datasets(preset: Preset, seed: int, folder: Path) -> None:
    write_addition(preset.addition, random.Random(f"addition {seed}"), folder / "addition", "sft.jsonl")
    for name in ("held_out", "train"):  # one row per number: there are no others to hold out
        rows = ({"number": number} for number in range(1, preset.guessing.highest + 1))
        write_rows(folder / "number_guessing" / f"{name}.jsonl", rows)
    rng = random.Random(f"number guessing {seed}")
    write_rows(folder / "number_guessing" / "sft.jsonl", guessing_demonstrations(preset.guessing, rng))


def write_addition(plan: AdditionPlan, rng: random.Random, folder: Path, demonstrations: str) -> None:
    """Problems of train.jsonl and held_out.jsonl, and the file `demonstrations`."""
    held_out, train, others = addition_pairs(plan, rng)
    write_rows(folder / "held_out.jsonl", map(addition_problem, held_out))
    write_rows(folder / "train.jsonl", map(addition_problem, train))
    write_rows(folder / demonstrations, addition_demonstrations(plan, others, rng))


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """A JSON line for each row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def build(out: Path, seed: int, preset_name: str) -> bool:
    """Build everything into `out`, all or nothing; False when it is there already from the same request.

    Raises FileExistsError when `out` has files that this builder did not make.
    """
    preset = PRESETS[preset_name]
    request = {"format": FORMAT, "seed": seed, "preset": preset_name, "plan": dataclasses.asdict(preset)}
    manifest = out / "assets.json"
    if manifest.exists() and json.loads(manifest.read_text()) == request:
        return False
    if out.exists() and not manifest.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} exists and has no assets.json: give another folder, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        build_model(preset.model, seed, work / "model")
        write_datasets(preset, seed, work)
        (work / "assets.json").write_text(json.dumps(request, indent=1) + "\n")
        work.chmod(0o755)
        replace_folder(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def check_overrides(file: str, overrides: Sequence[str]) -> None:
    """Raise UsageError for what is wrong with a config, unless it is about files that the quickstart makes."""
    named = {word.partition("=")[0] for word in overrides}
    config = resolve_paths(load_config(Path(file), overrides))
    for problem in problems(config):
        if problem.key in named or problem.key not in MADE_LATER:
            raise ConfigError.of(file, problem)
    found = check_sources(config, file, libraries=False)
    for problem in limit_problems(config, found) if not RunDir.of(config).began else ():
        raise ConfigError.of(file, problem)


def main(argv: list[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m launch.quickstart.assets", description=about)
    parser.add_argument("--out", type=Path, default=Path("runs/assets"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--check", nargs="+", metavar=("CONFIG", "key=value"), help="only check a config")
    arguments = parser.parse_args(argv)
    if arguments.check:
        try:
            check_overrides(arguments.check[0], arguments.check[1:])
        except UsageError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        return EXIT_DONE
    try:
        made = build(arguments.out, arguments.seed, arguments.preset)
    except FileExistsError as error:
        parser.error(str(error))
    print(f"{arguments.out}: {'built' if made else 'already there'} (seed {arguments.seed}, {arguments.preset})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
