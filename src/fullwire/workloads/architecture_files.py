"""Transformers by name, or as other tools describe them.

`architecture("llama3-70b")` takes a built-in name, spelt as anyone spells it. It also takes a
config.json of Hugging Face or its folder, Megatron's arguments in a file or in one line, and a TOML
file of torchtitan. Nothing is downloaded.

A flag of Megatron that is switched on and unknown here is refused by name: it may change shapes or
counts.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from fullwire.errors import UsageError
from fullwire.files import opened
from fullwire.run.store import is_run
from fullwire.units import shown
from fullwire.workloads.architecture import Architecture, Mla, Moe
from fullwire.workloads.architecture_fields import Fields, check_fields
from fullwire.workloads.hugging_face_config import from_hugging_face

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same, before Python had it

ArchitectureLike: TypeAlias = str | Path | Architecture
MOST_BYTES = 4 * 1024 * 1024
_FOLDER = Path(__file__).parent / "architectures"
_OF_OTHER_KIND = re.compile(r"(instruct|base|chat|hf|preview|v0\.[1-3]|bf16|fp8|nvfp4|mcore|it)$")

# Rows of the vocabularies that a kind of tokenizer tells, before Megatron pads them.
TOKENIZER_VOCABULARIES = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "TikTokenizer": 131072,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
}
_USUAL_TOKENIZER = "GPT2BPETokenizer"  # of pretrain_gpt.py; it needs a --merge-file

# Flags of training, data, plans, numerics and torchrun: they leave the model as it is.
_HARMLESS = re.compile(
    r"^(.*parallel.*|.*pipeline_(stage|num_layers).*|.*overlap.*|.*recompute.*|.*batch.*|.*lr.*"
    r"|.*adam.*|.*decay.*|.*warmup.*|.*data.*|.*tokenizer.*|tiktoken.*|.*vocab_file|merge_file"
    r"|split|train_.*|eval_.*|test_mode|skip_train|sample_rate|.*log.*|.*checkpoint.*|.*ckpt.*"
    r"|save.*|load.*|exit_.*|bf16|fp16|.*fp8.*|fp4.*|fp32_residual_connection|params_dtype"
    r"|.*fusion.*|fused.*|no_.*|non_persistent.*|use_(?!.*rotary).*|init_.*|seed|clip_grad"
    r"|distributed_.*|optimizer.*|override_opt_param_scheduler|attention_backend|transformer_impl"
    r"|.*dropout.*|.*loss.*|rotary_.*|rope_.*|yarn_.*|mscale.*|beta_(fast|slow)"
    r"|original_max_position_embeddings|position_embedding_type|.*epsilon|max_position_embeddings"
    r"|seq_length|moe_(?!ffn|shared|layer_freq|router_topk$|latent).*|manual_gc.*|tensorboard.*"
    r"|wandb.*|num_workers|profile.*|timing.*|cuda_graph.*|enable_(?!hyper).*|te_.*|accumulate_.*"
    r"|grad_reduce.*|attention_softmax_in_fp32|apply_.*|initial_.*|hysteresis|mock.*|sgd.*|muon.*"
    r"|deterministic_mode|async.*|cpu_.*|finetune|reset_.*|eod.*|exp_.*|inprocess.*|nccl.*"
    r"|delay.*|rampup.*|check_.*|account.*|first_last.*|num_layers_at_.*|num_virtual.*|main_.*"
    r"|high_priority.*|ddp.*|ema.*|(cp|tp)_comm_.*|empty_unused_memory_level|rerun_.*|straggler.*"
    r"|result_rejected.*|error_injection.*|replication.*|export_.*|trust_remote_code|qk_l2_norm"
    r"|activation_func_clamp_value|glu_linear_offset|standalone_embedding_stage|lazy_mpu_init"
    r"|adlr_.*|align_.*|local_rank|nproc_per_node|nnodes|node_rank|master_(addr|port)|rdzv_.*"
    r"|.*straggler.*|fine_grained_activation_offloading|activation_offload_fraction"
    r"|offload_(modules|optimizer_states)|min_offloaded_tensor_size"
    r"|delta_offload_bytes_across_pp_ranks"
    r"|defer_.*|wgrad_.*|distribute_saved_activations|.*mmap.*"
    r"|num_distributed_optimizer_instances|record_memory_history|memory_snapshot_path|qk_clip.*"
    r"|external_cuda_graph|sharp_.*|create_all_gather_group|suggested_communication_.*"
    r"|embedding_init_.*|layernorm_zero_centered_gamma|openai_gelu|erf_gelu|disable_jit_fuser"
    r"|onnx_safe|sft|flash_decode|allow_ambiguous_.*|object_storage_.*|iterations_to_skip"
    r"|phase_transition_iterations"
    # Those of DeepSpeed and Megatron-DeepSpeed.
    r"|deepspeed(_config|_mpi)?|ds_(pipeline_enabled|inference|fused_adam)|zero_stage)$"
)


def architecture(given: ArchitectureLike) -> Architecture:
    """Take a transformer by its name, or from a description of another tool.

    - `given`: a built-in name such as `llama3-70b`, a file or folder with a config.json,
      Megatron's arguments as a file or as text, or a TOML file of torchtitan. `fullwire workloads`
      lists the names.
    """
    if isinstance(given, Architecture):
        return given
    text = str(given)
    path = Path(text)
    try:
        is_folder = path.is_dir()
        path = path / "config.json" if is_folder else path
        is_file = path.is_file()
    except (OSError, ValueError):
        is_folder = is_file = False
    # A file or a folder that exists comes before a name: its config.json may have other sizes.
    if isinstance(given, str) and not is_file:
        if re.search(r"(^|\s)--\w", text):
            return from_megatron(text, "arguments")
        known = None if is_folder and "/" in text else built_in(text)
        if known is not None:
            return known
    if not is_file:
        if is_folder:
            if is_run(Path(text)):
                raise UsageError(
                    f"model: expected a model, got the run {shown(text)}: --from takes a run"
                )
            raise UsageError(f"model: expected a config.json in the folder {shown(text)}")
        near = get_close_matches(_folded(text), _spellings(), n=1)
        hint = f". The nearest is {_spellings()[near[0]]}" if near else ""
        raise UsageError(
            f"model: expected a built-in name, a config.json, Megatron's arguments or a TOML file "
            f"of torchtitan, got {shown(text)}{hint}"
        )
    with opened(path) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UsageError(f"{path}: expected a model in at most {MOST_BYTES:,} bytes")
    document = content.decode("utf-8-sig", errors="replace")
    if path.suffix == ".toml":
        return _from_torchtitan(document, str(path))
    if document.lstrip().startswith("{"):
        return from_hugging_face(document, str(path))
    return from_megatron(document, str(path))


def built_in(name: str) -> Architecture | None:
    """Return the built-in transformer of a name, spelt as anyone spells it."""
    known = _known_name(name)
    return None if known is None else _built_in()[known]


def names() -> tuple[str, ...]:
    """List the built-in transformers."""
    return tuple(_built_in())


# Built-in names.


@cache
def _built_in() -> Mapping[str, Architecture]:
    known: dict[str, Architecture] = {}
    for name, (path, table) in _tables().items():
        place = f"{path}: [{name}]"
        held = {key: value for key, value in table.items() if key not in ("aliases", "like")}
        if "like" in table:
            if table["like"] not in known:
                raise UsageError(f"{place}: like: expected a model above, got {table['like']!r}")
            check_fields(Architecture, held, place, is_whole=False)
            known[name] = replace(known[table["like"]], name=name, **held)
            continue
        check_fields(Architecture, {"name": name, "kv_heads": 0, "head_dim": 0, **held}, place)
        heads, hidden = held["heads"], held["hidden"]
        learned = held["sequence"] if held.get("positions") == "learned" else 0
        held = {
            "kv_heads": heads,
            "head_dim": hidden // heads,
            "learned_positions": learned,
            **held,
        }
        for key, of in (("mla", Mla), ("moe", Moe)):
            if key in held:
                check_fields(of, held[key], f"{place}: {key}")
                held[key] = of(**held[key])
        known[name] = Architecture(name=name, **held)
    return known


@cache
def _tables() -> Mapping[str, tuple[Path, dict[str, Any]]]:
    """Return the file and the table of each built-in model."""
    tables: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in sorted(_FOLDER.glob("*.toml")):
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        defaults = document.pop("defaults", {})
        for name, table in document.items():
            tables[name] = path, table if "like" in table else {**defaults, **table}
    return tables


@cache
def _spellings() -> Mapping[str, str]:
    pairs = (
        (name, spelling)
        for name, (_, table) in _tables().items()
        for spelling in (name, *table.get("aliases", ()))
    )
    return {_folded(spelling): name for name, spelling in pairs}


def _folded(name: str) -> str:
    """Reduce a name to the letters, figures and points that all spellings share."""
    last = name.strip().lower().rsplit("/", 1)[-1]
    while (shorter := _OF_OTHER_KIND.sub("", last).rstrip("-_ ")) != last and shorter:
        last = shorter
    return re.sub(r"[^a-z0-9.]", "", last.replace("meta-llama", "llama"))


def _known_name(text: str) -> str | None:
    return _spellings().get(_folded(text))


# torchtitan.

_FLAVORS = {
    ("llama3", "8b"): "llama3-8b",
    ("llama3", "70b"): "llama3-70b",
    ("llama3", "405b"): "llama3.1-405b",
    ("deepseekv3", "671b"): "deepseek-v3",
    ("deepseekv3", "236b"): "deepseek-v2",
    ("deepseekv3", "16b"): "deepseek-v2-lite",
    ("gptoss", "120b"): "gpt-oss-120b",
    ("gptoss", "20b"): "gpt-oss-20b",
}


def _from_torchtitan(text: str, place: str) -> Architecture:
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: expected TOML: {error}") from None
    model = document.get("model")
    if not isinstance(model, dict) or not model.get("name") or not model.get("flavor"):
        raise UsageError(f"{place}: expected a table [model] with a name and a flavor")
    family, flavor = _folded(str(model["name"])), str(model["flavor"]).lower()
    name = _FLAVORS.get((family, flavor)) or _known_name(f"{family}-{flavor}")
    if name is None:
        known = ", ".join(" ".join(pair) for pair in _FLAVORS)
        raise UsageError(
            f"{place}: model: expected a name and a flavor such as {known}, got "
            f"{shown(model['name'])} {shown(model['flavor'])}"
        )
    training = document.get("training", {})
    length = training.get("seq_len") if isinstance(training, dict) else None
    found = _built_in()[name]
    if length is None:
        return found
    if isinstance(length, bool) or not isinstance(length, int):
        raise UsageError(f"{place}: training.seq_len: expected a whole number, got {length!r}")
    return replace(found, sequence=length)


def from_megatron(text: str, place: str) -> Architecture:
    """Read arguments; `place` names them in messages."""
    config = Fields(dict(_flags(text, place)), place)
    heads, hidden = config.heads_and_hidden()
    is_swiglu = config.flag("swiglu", False)
    # Megatron's own default: 4 times the width, or two thirds of it with SwiGLU.
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if is_swiglu else 4 * hidden
    ffn = config.whole("ffn_hidden_size", default=usual)
    norm = config.held.get("normalization", "LayerNorm")
    config.known.update(("normalization", "squared_relu"))
    kind = config.held.get("position_embedding_type", "learned_absolute")
    is_rotary = config.flag("use_rotary_position_embeddings", False)
    is_learned = kind == "learned_absolute" and not is_rotary
    learned = config.whole("max_position_embeddings", "seq_length")
    has_bias = not config.flag("disable_bias_linear", False)
    has_qkv_bias = config.flag("add_qkv_bias", False)
    groups = heads
    shared = config.heads_of_keys(heads, "num_query_groups", default=1)
    if config.flag("group_query_attention", False):
        groups = shared
    elif shared not in (1, heads):  # 1 is Megatron's default, which means nothing alone
        raise UsageError(
            f"{place}: num_query_groups: expected --group-query-attention beside it, got {shared} "
            "alone, which Megatron-LM ignores"
        )
    window, full_every = _window(config)
    softmax = config.held.get("softmax_type", "vanilla")
    config.known.add("softmax_type")
    if softmax not in ("vanilla", "off-by-one", "learnable"):
        raise UsageError(
            f"{place}: softmax_type: expected vanilla, off-by-one or learnable, got "
            f"{shown(softmax)}"
        )
    model = Architecture(
        name=Path(place).stem,
        layers=config.whole("num_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=groups,
        head_dim=config.whole("kv_channels", default=hidden // heads),
        ffn=ffn,
        vocab=_vocabulary(config),
        sequence=config.whole("seq_length", default=learned),
        is_gated=config.flag("quick_geglu", False) or is_swiglu,
        is_tied=not config.flag("untie_embeddings_and_output_weights", False),
        biases="all" if has_bias else "qkv" if has_qkv_bias else "none",
        norm="rms" if norm == "RMSNorm" else "layer",
        has_query_key_norm=config.flag("qk_layernorm", False)
        and "multi_latent_attention" not in config.held,
        has_sinks=softmax == "learnable",
        positions="learned" if is_learned else "none" if kind == "none" else "rotary",
        learned_positions=learned if is_learned else 0,
        window=window,
        full_every=full_every,
        mla=_mla(config),
        moe=_moe(config, ffn, has_bias),
        mtp_layers=config.whole("mtp_num_layers", default=0),
    )
    config.check_rest(_HARMLESS)
    return model


def _flags(text: str, place: str) -> Iterator[tuple[str, Any]]:
    """Yield flags and values; a comment ends a line, and a flag without a value is true."""
    words = _arguments(text, place)
    if not any(word.startswith("--") for word in words):
        raise UsageError(f"{place}: expected Megatron's arguments such as --num-layers 32")
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if not word.startswith("--"):
            unset = _VARIABLE.fullmatch(word)
            # It may hold flags. Behind a flag it may also be a path or another value.
            if unset and (not name or _OF_FLAGS.fullmatch(unset["braced"] or unset["plain"])):
                raise UsageError(f"{place}: expected the flags of {word}, which nothing there sets")
            values.append(word)
            continue
        if name:
            value = " ".join(values)
            is_whole = value.isascii() and value.isdigit()
            truth = {"": True, "true": True, "false": False}.get(value.lower(), value)
            yield name, int(value) if is_whole else truth
        flag, _, value = word[2:].partition("=")
        name, values = flag.replace("-", "_"), [value] if value else []


# Of a shell script: words behind which a command or an assignment may begin, words that end a
# command, an assignment, and a variable with the default that it may have.
_LINE_END = "\0"
_BEGINS = {
    _LINE_END,
    ";",
    "&&",
    "||",
    "then",
    "else",
    "do",
    "export",
    "local",
    "declare",
    "readonly",
}
_ENDS = {";", "&", "&&", "|", "||", "|&", ">", ">>", "2>&1", "&>"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(
    r"\$(?:\{(?P<braced>\w+)(?P<all>\[[@*]\])?(?::?-(?P<usual>[^{}]*))?\}|(?P<plain>\w+|[@*]))"
)
_OF_FLAGS = re.compile(r".*(args|opts|options|flags)(_list)?", re.IGNORECASE)  # a variable's name


def _arguments(text: str, place: str) -> list[str]:
    """Return the words of the last Python script's command, with the shell's variables filled in.

    Without a command, all words count. If a file only sets variables, their flags count.
    """
    lines = text.replace("\\\n", " ").replace("\n", f"\n{_LINE_END} ")
    try:
        words = shlex.split(lines, comments=True)
    except ValueError as error:
        raise UsageError(f"{place}: expected Megatron's arguments: {error}") from None
    variables: dict[str, str] = {}
    command: list[str] = []
    held = 0
    place_of, is_beginning = iter(words), True
    for word in place_of:
        assignment = _ASSIGNMENT.fullmatch(word) if is_beginning else None
        if assignment is None:
            is_beginning = word in _BEGINS
            filled = _filled(word, variables, place)
            command += filled
            held += sum(map(len, filled))
            if held > MOST_BYTES:
                raise UsageError(f"{place}: expected at most {MOST_BYTES:,} bytes of arguments")
            continue
        name, adds, value = assignment.groups()
        if value.startswith("("):
            parts = [value[1:]]
            while parts[-1].count(")") <= parts[-1].count("("):  # a value may be "([0]*3+[1]*5)"
                if (part := next(place_of, None)) is None:
                    raise UsageError(f"{place}: {name}: expected ) behind its words, got none")
                parts.append(part)
            value = " ".join(parts)[:-1]
        value = " ".join(_filled(value.replace(_LINE_END, " "), variables, place))
        variables[name] = f"{variables.get(name, '')} {value}".strip() if adds else value
    scripts = [index for index, word in enumerate(command) if word.endswith(".py")]
    if scripts:
        return _until_its_end(command[scripts[-1] + 1 :])
    command = [word for word in command if word != _LINE_END]
    if any(word.startswith("--") for word in command):
        return command
    return " ".join(variables.values()).split()


def _filled(word: str, variables: Mapping[str, str], place: str) -> list[str]:
    """Return a word with its variables filled in: several words, where they hold several.

    A variable that nobody sets stays as it is: it may be the path of a file.
    """

    def value(found: re.Match[str]) -> str:
        name = found["braced"] or found["plain"]
        if name in ("@", "*"):
            return ""  # arguments of the script itself
        if name in variables or found["usual"] is not None:
            return variables.get(name) or found["usual"] or ""
        return found[0]

    filled = _VARIABLE.sub(value, word)
    if len(filled) > MOST_BYTES:
        raise UsageError(f"{place}: expected at most {MOST_BYTES:,} bytes in all variables")
    is_several = filled != word or word.startswith("--")
    return filled.split() if is_several else [filled]


def _until_its_end(words: list[str]) -> list[str]:
    """Return the words of a command: a line that goes on with flags is still its own."""
    kept: list[str] = []
    for word, following in zip(words, [*words[1:], _LINE_END], strict=True):
        if word in _ENDS or (word == _LINE_END and kept and not following.startswith("--")):
            break
        if word != _LINE_END:
            kept.append(word)
    return kept


def _vocabulary(config: Fields) -> int:
    """Return the rows of the embedding, padded as Megatron pads them."""
    divisor = config.whole("make_vocab_size_divisible_by", default=128)
    divisor *= config.whole("tensor_model_parallel_size", default=1)
    if padded := config.whole("padded_vocab_size", default=0):
        config.known.add("vocab_size")
        return padded
    usual = _USUAL_TOKENIZER if "merge_file" in config.held else ""
    kind = config.held.get("tokenizer_type", usual)
    rows = config.whole("vocab_size", default=TOKENIZER_VOCABULARIES.get(kind, 0))
    if not rows:
        raise UsageError(
            f"{config.place}: expected --vocab-size with it, since a tokenizer's file is not opened"
        )
    if kind == "NullTokenizer":
        rows += 1  # its end-of-document token
    return -(-rows // divisor) * divisor


def _window(config: Fields) -> tuple[int | None, int]:
    """Return the keys that a query sees, and the step of the layers that see all of them."""
    config.known.add("window_size")
    full_every = config.whole("window_attn_skip_freq", default=0)
    given = config.held.get("window_size")
    if given is None or full_every == 1:
        return None, 0
    # Keys before the query and behind it, such as 127,0 or (127,0).
    match = re.fullmatch(r"\(?(\d{1,9})[ ,]+0\)?", str(given))
    if match is None:
        raise UsageError(
            f"{config.place}: window_size: expected keys before a query and 0 behind it, such as "
            f"127,0, got {shown(str(given))}"
        )
    return int(match[1]) + 1, full_every


def _mla(config: Fields) -> Mla | None:
    if not config.flag("multi_latent_attention", False):
        return None
    return Mla(
        kv_rank=config.whole("kv_lora_rank", default=32),
        query_rank=config.whole("q_lora_rank", default=0) or None,
        nope_dim=config.whole("qk_head_dim", default=128),
        rope_dim=config.whole("qk_pos_emb_head_dim", default=64),
        value_dim=config.whole("v_head_dim", default=128),
    )


def _moe(config: Fields, ffn: int, has_bias: bool) -> Moe | None:
    experts = config.whole("num_experts", default=0)
    every = config.held.get("moe_layer_freq", 1)
    is_corrected = config.flag("moe_router_enable_expert_bias", False)
    config.known.update(("moe_layer_freq", "moe_shared_expert_gate"))
    if not experts:
        return None
    first_dense, every = _moe_pattern(every, config.place)
    return Moe(
        experts=experts,
        top_k=config.whole("moe_router_topk", default=2),
        ffn=config.whole("moe_ffn_hidden_size", default=ffn),
        shared_ffn=config.whole("moe_shared_expert_intermediate_size", default=0),
        has_shared_gate=config.flag("moe_shared_expert_gate", False),
        has_router_bias=is_corrected or has_bias,
        first_dense=first_dense,
        every=every,
    )


def _moe_pattern(given: object, place: str) -> tuple[int, int]:
    """Return the dense layers at the beginning and the step of layers with experts."""
    if isinstance(given, int):
        # Megatron counts from the first layer, which has experts.
        if given == 1:
            return 0, 1
        raise UsageError(f"{place}: moe_layer_freq: expected 1 or a list, got {given}")
    terms = re.findall(r"\(?\[([01, ]+)\]\)?(?:\s*\*\s*(\d+))?", str(given))
    pattern = [
        int(figure)
        for figures, times in terms
        for _ in range(int(times or 1))
        for figure in re.findall("[01]", figures)
    ]
    dense = pattern.index(1) if 1 in pattern else len(pattern)
    if not pattern or 0 in pattern[dense:]:
        raise UsageError(
            f"{place}: moe_layer_freq: expected dense layers and then layers with experts, such "
            f"as ([0]*3+[1]*58), got {shown(str(given))}"
        )
    return dense, 1
