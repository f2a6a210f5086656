"""`posttrain explain NAME`: what an algorithm, setting or metric is, its source, when to use it, what to watch.

The pages are the docstrings of the algorithm files, which are imported without torch, and `prose/*.md`; every settings
key has at least its own sentence.

In `prose/` a `##` heading is the name of a page. `WORDS` are words of the field and of the lines that a run prints;
`TOPICS` have no algorithm file of their own. `METRICS` are the most useful metrics, `FAMILIES` all others that a run
writes; algorithms declare their own.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from posttrain.algorithms import aggregation, correction, kl, kl_in_reward, overlong
from posttrain.algorithms.aggregation import AGGREGATION_MODES
from posttrain.algorithms.kl import KL_TYPES
from posttrain.algorithms.losses import value
from posttrain.algorithms.registry import ADV_ESTIMATORS, ESTIMATOR_KEY, LOSS_KEY, POLICY_LOSSES
from posttrain.config.choices import load_own_algorithms
from posttrain.config.resolved import ConfigError, Problem
from posttrain.config.root import PPOConfig
from posttrain.config.schema import Leaf, leaves
from posttrain.config.trees import COMMANDS
from posttrain.errors import working_folder


def _read(file: str) -> dict[str, str]:
    text = (Path(__file__).parent / "prose" / file).read_text(encoding="utf-8")
    _, *parts = re.split(r"^## (.+)\n", text, flags=re.M)
    return {name: body.strip("\n") for name, body in zip(parts[::2], parts[1::2], strict=True)}


WORDS, TOPICS, METRICS = _read("words.md"), _read("topics.md"), _read("metrics.md")
SUPERVISED_TOPICS, SUPERVISED_METRICS = _read("supervised.md"), _read("supervised_metrics.md")
FAMILIES = {name: " ".join(text.split()) for name, text in _read("families.md").items()}


def _by_other_name(names: dict[str, str]) -> dict[str, str]:
    # Page -> its other names, turned around.
    return {other: page for page, others in names.items() for other in others.split(", ")}


# Other names of these and other pages; a blank also matches `_` and `-`, and a plural its singular.
SPELLINGS = _by_other_name(
    {
        "advantage": "adv",
        "kl": "kl divergence",
        "kl_loss": "kl loss",
        "clip": "clipping, clip ratio, clip range",
        "reference": "ref, ref policy, reference model, reference policy",
        "checkpoint": "ckpt, saved, best checkpoint",
        "batch size": "batch, train batch size",
        "mini-batch": "minibatch, mini batch size",
        "micro-batch": "microbatch, micro batch size",
        "rollout": "gen, generation, trajectory, episode, vllm, sglang",
        "rollout.n": "group size",
        "gradient norm": "grad norm, grad clip",
        "learning rate": "lr",
        "warm-up": "warmup",
        "optimizer": "adam, adamw, optimizer step",
        "ground truth": "reference answer",
        "tok/s": "tokens per second, throughput",
        "response_length": "response length, completion length",
        "response": "completion",
        "log-prob": "logprob, log probability, old log-prob, old log-probs",
        "weight sync": "sync",
        "value": "value function",
        "critic": "value model",
        "scores": "score",
        "validation": "val, eval, mean@",
        "rollout_correction": "importance weight, importance sampling",
        "ratio": "importance ratio",
        "return": "discount, gamma",
        "seed": "random seed",
        "out of memory": "oom",
        "prompt": "dataset",
        "worker": "rank, gpu, ray",
        "dtype": "bf16, bfloat16",
        "pass@k": "pass@",
        "maj@k": "maj@",
    }
)


# Heading -> name -> the module or function whose docstring is the page.
DOCSTRINGS: dict[str, dict[str, object]] = {
    "How token losses become one number": {"loss_agg_mode": aggregation, **AGGREGATION_MODES},
    "KL": {
        "kl_loss_type": kl,
        **{name: KL_TYPES[name] for name in ("k1", "abs", "k2", "k3")},
        "use_kl_in_reward": kl_in_reward,
    },
    "Off-policy": {"rollout_correction": correction},
    "Shaping": {"overlong_buffer": overlong},
}
ALIASES = _by_other_name(
    {
        "gae": "ppo",
        "drgrpo": "dr_grpo, dr.grpo",
        "k1": "kl",
        "k2": "mse",
        "k3": "low_var_kl",
        "kl_loss_type": "kl_penalty",
        "use_kl_in_reward": "kl_in_reward, kl_ctrl",
        "reinforce_plus_plus": "reinforce_pp, reinforce++",
        "geo_mean": "gmpo",
        "rollout_correction": "tis, icepop, rollout_is, rollout_rs",
        "dapo": "filter_groups",
        "overlong_buffer": "overlong",
        "vanilla": "loss_mode",
        "value_loss": "cliprange_value",
        "rollout.n": "rollout_n",
        "lora": "qlora, peft, lora_rank, lora_alpha, target_modules, exclude_modules, lora_adapter_path, export_lora, "
        "quantization",
        "sft": "fsdp_sft_trainer, sft_trainer",
        "reward-model": "reward_model_trainer, bradley_terry",
    }
)
# A number in a line that a run prints: `38%`, `(+0.044)`, `4/20`, `0:35`, `13,395`.
_NUMBER = re.compile(r"\(?[+-]?\d[\d.,:/]*(?:e[+-]?\d+)?\s?%?\)?")
KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")
PLUS = "With `+` appended it keeps this value and has the gradient of `k2`, which is unbiased (see `kl_loss_type`)."


class UnknownPage(ConfigError):
    """There is nothing of that name to explain."""

    def __str__(self) -> str:
        return f"{self.problems[0].what} {self.problems[0].do}"


def explain(name: str | None = None) -> str:
    """The page of an algorithm, setting or metric; without a name the list of all."""
    if name is None:
        return _contents()
    given = name.strip().strip("`").strip()
    if given not in _pages():  # perhaps the user's own algorithm, in a file of the working folder
        load_own_algorithms({ESTIMATOR_KEY: given, LOSS_KEY: given}, (), working_folder())
    wanted = _resolve_name(given)
    page = _page(wanted) or _page(given)  # names of data sources are case-sensitive
    settings = _settings(wanted, leaves(PPOConfig))
    elsewhere = _supervised(wanted, page, exact=bool(page or settings))
    if page is None and not settings and not elsewhere:
        raise UnknownPage(
            [Problem(f"There is no page on `{name}`.", do=f"{_nearest(wanted)} `posttrain explain` lists all.".strip())]
        )
    if page in WORDS.values() and wanted not in leaves(PPOConfig):
        # A section of the same name would list dozens of keys; the page names those that matter.
        settings = {
            key: leaf for key, leaf in leaves(PPOConfig).items() if _plain(key.rpartition(".")[2]) == _plain(given)
        }
    if page is not None and page not in SUPERVISED_TOPICS.values():
        # The keys that a page names are followed by their own sentences.
        settings |= {key: leaves(PPOConfig)[key] for key in KEY.findall(page) if key in leaves(PPOConfig)}
    own = [_sentence(leaf) for leaf in settings.values()]
    others = [_sentence(leaf, commands) for text, (leaf, commands) in elsewhere.items() if text not in own]
    sentences = "\n".join([*own, *others])
    return "\n\n".join([part for part in (page, sentences) if part])


def algorithm_pages() -> dict[str, dict[str, str]]:
    """Heading -> name -> page, of the estimators and losses that are registered now."""
    estimators = {name: inspect.cleandoc(one.page) for name, one in ADV_ESTIMATORS.items()}
    losses = {loss_page(name): inspect.cleandoc(one.page) for name, one in POLICY_LOSSES.items()}
    return {"Advantage estimators": estimators, "Losses": {**losses, "value_loss": inspect.getdoc(value) or ""}}


def loss_page(loss: str) -> str:
    """The name of a loss's page: its own, unless an estimator has that."""
    return f"{loss}_loss" if loss in ADV_ESTIMATORS else loss


def declared_metrics() -> dict[str, str]:
    """The metrics that algorithms declare, with what to make of them."""
    declarations = (*ADV_ESTIMATORS.values(), *POLICY_LOSSES.values())
    return {name: text for declaration in declarations for name, text in declaration.metrics.items()}


def _metrics() -> dict[str, str]:
    return METRICS | declared_metrics() | SUPERVISED_METRICS


def _known() -> list[str]:
    keys = [*leaves(PPOConfig), *(key for tree in COMMANDS.values() for key in leaves(tree.root))]
    return list(dict.fromkeys([*_pages(), *SPELLINGS, *ALIASES, *keys]))


def _nearest(wanted: str) -> str:
    near = difflib.get_close_matches(wanted, _known(), n=3, cutoff=0.6)
    near.sort(key=lambda name: sorted(name) != sorted(wanted))  # swapped letters first
    near += [name for name in _known() if wanted in re.split(r"[\W_]+", name)]
    return f"Nearest: {', '.join(list(dict.fromkeys(near))[:3])}." if near else ""


def _plain(name: str) -> str:
    # Blanks, `_` and `-` are the same.
    return re.sub(r"[\s_-]+", " ", name.lower()).strip()


def _by_plain_name() -> dict[str, str]:
    # Normalised spelling -> name, of pages and settings.
    table = {_plain(key.rpartition(".")[2]): key.rpartition(".")[2] for key in leaves(PPOConfig)}
    table |= {_plain(name): name for name in (*leaves(PPOConfig), *ALIASES, *_pages())}
    return table | {_plain(word): name for word, name in SPELLINGS.items()} | {_plain(word): word for word in WORDS}


def _resolve_name(given: str) -> str:
    # Tried in this order: lower case, other blanks, without the numbers of a printed line (`38% no signal`), as a
    # singular, and as the stage that bounds a step.
    wanted, table = given.lower(), _by_plain_name()
    if wanted in _pages() or wanted in leaves(PPOConfig) or wanted in ALIASES:
        return wanted
    if _plain(wanted) in table:
        return table[_plain(wanted)]
    if _page(wanted) or _settings(wanted, leaves(PPOConfig)):
        return wanted
    words = " ".join(_NUMBER.sub(" ", wanted).split()).strip(" ,:")
    if words.endswith("-bound"):
        return "bound"
    first = words.partition(" ")[0] if words != wanted else words  # of a piece of a line: `rollout 12/64 responses`
    for text in (words, words.removesuffix("s"), first):
        if _plain(text) in table:
            return table[_plain(text)]
    return wanted


def _pages() -> Mapping[str, str]:
    return _pages_with((*ADV_ESTIMATORS, *POLICY_LOSSES))


@cache
def _pages_with(algorithms: tuple[str, ...]) -> dict[str, str]:
    # `algorithms` is the key of the cache: pages are made again when the user's own algorithm is registered.
    docstrings = {name: inspect.getdoc(owner) or "" for group in DOCSTRINGS.values() for name, owner in group.items()}
    own = {name: text for group in algorithm_pages().values() for name, text in group.items()}
    metrics = {name: f"`{name}`: {text}" for name, text in (FAMILIES | _metrics()).items()}
    return own | docstrings | TOPICS | SUPERVISED_TOPICS | metrics | WORDS


def _page(wanted: str) -> str | None:
    # `wanted` may be a page, another spelling of one, or a settings key that ends with its name.
    pages = _pages()
    base = wanted.removesuffix("+")
    if base != wanted and ALIASES.get(base, base) in DOCSTRINGS["KL"]:
        return f"{pages[ALIASES.get(base, base)]}\n\n{PLUS}"
    endings = [wanted]
    if wanted in leaves(PPOConfig):
        endings += [wanted.split(".", depth)[-1] for depth in range(1, wanted.count(".") + 1)]
    names = (ending if ending in WORDS else ALIASES.get(ending, ending) for ending in endings)
    found = next((name for name in names if name in pages), None)
    if found == "loss_agg_mode":
        return "\n\n".join([pages[found], *(pages[mode] for mode in AGGREGATION_MODES)])
    if found:
        return pages[found]
    text = family_text(wanted)
    return f"`{wanted}`: {text}" if text else None


def _settings(wanted: str, table: dict[str, Leaf]) -> dict[str, Leaf]:
    # A key, the end of keys, or a whole section.
    if wanted in table:
        return {wanted: table[wanted]}
    ends = {key: leaf for key, leaf in table.items() if key.endswith("." + wanted)}
    return ends or {key: leaf for key, leaf in table.items() if f".{wanted}." in f".{key}"}


def _supervised(wanted: str, page: str | None, *, exact: bool) -> dict[str, tuple[Leaf, list[str]]]:
    # Settings of the supervised trainers by their sentence, with the commands that have them: those named on their own
    # page; an exact key; and, if nothing else has that name (`exact` is false), ends of keys and sections.
    found: dict[str, tuple[Leaf, list[str]]] = {}
    for verb, tree in COMMANDS.items():
        table = leaves(tree.root)
        if page is not None and page == SUPERVISED_TOPICS.get(verb):
            hits = {key: table[key] for key in KEY.findall(page) if key in table}
        else:
            hits = {wanted: table[wanted]} if wanted in table else {} if exact else _settings(wanted, table)
        for leaf in hits.values():
            found.setdefault(_sentence(leaf), (leaf, []))[1].append(f"posttrain {verb}")
    return found


def _sentence(leaf: Leaf, commands: Sequence[str] = ()) -> str:
    default = "null" if leaf.default is None else leaf.default
    where = f"of {' and '.join(commands)}, " if commands else ""
    limits = f"\n    It must be {leaf.range.words}." if leaf.range is not None else ""
    return f"{leaf.key} ({where}default {default})\n    {leaf.sentence}{limits}"


def metric_text(name: str) -> str | None:
    """What a metric is and what to make of it, in a sentence or two; None without an explanation."""
    return _metrics().get(name) or family_text(name)


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    return [
        (re.compile("".join(map(_expression, re.split(r"(\{[^}]*\}|[A-Z]{4,}|K$)", name)))), text)
        for name, text in FAMILIES.items()
    ]


def family_text(metric: str) -> str | None:
    """What a metric is, from the first heading of families.md that matches; None without one."""
    return next((text for pattern, text in _patterns() if pattern.fullmatch(metric)), None)


def _expression(part: str) -> str:
    if part.startswith("{"):
        return f"(?:{'|'.join(map(re.escape, part[1:-1].split(',')))})"
    if part == "K":
        return r"\d+"
    return r".+" if part.isupper() else re.escape(part)


def _contents() -> str:
    lines = ["`posttrain explain NAME`, where NAME is one of these, or any settings key:"]
    groups = {title: list(group) for title, group in (algorithm_pages() | DOCSTRINGS).items()}
    topics, metrics = [*TOPICS, *SUPERVISED_TOPICS], [*dict.fromkeys([*_metrics(), *FAMILIES])]
    metrics = [name for name in metrics if name not in WORDS]
    words = {"Words of the field, and of what a run prints": list(WORDS)}
    for title, names in (words | groups | {"Topics": topics, "Metrics": metrics}).items():
        lines += ["", title, *(f"  {name:<29} {first_sentence(name)}" for name in names)]
    spellings = ", ".join(f"{alias} ({name})" for alias, name in ALIASES.items())
    return "\n".join([*lines, "", f"Other spellings: {spellings}.", "KL types also with `+` appended."])


def first_sentence(name: str) -> str:
    """What the page says first, without repeating its name, up to the first full stop."""
    text = " ".join(_pages()[name].split("\n\n")[0].split())
    text = re.sub(r"^`[^`]+`(?: \(also `[^`]+`\))?: ", "", text)
    return re.split(r"(?<=[.;]) ", text)[0].rstrip(".;") + "."
