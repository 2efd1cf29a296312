"""Find out whether the paths of a user are a run, a workload, or traces of one format."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fullwire.errors import DamagedInput, UsageError
from fullwire.files import (
    MOST_SNIFFED_BYTES,
    SNIFFED_BYTES,
    beginning_of,
    files_in,
    files_like,
    name_of,
    path_of,
    refuse_packed,
)
from fullwire.importers._format import CERTAIN, POSSIBLE, Format
from fullwire.packed import unpacked_elsewhere
from fullwire.units import shown

RUN, WORKLOAD = "run", "workload"  # Fullwire's own kinds.
_ARCHIVE = "archives"  # Also files in compressions that Fullwire does not unpack.
_MOST_NAMED = 5  # Files that a sentence names.
_MOST_SNIFFED = 1_000  # Files of a directory that are looked at, some 0.1 ms each.


class Given(NamedTuple):
    """The files to read: traces of one kind, NCCL's logs beside them, and the left-out files."""

    kind: str
    traces: list[Path]
    beside: list[Path]
    left_out: list[str]


def given(
    formats: Mapping[str, Format], where: str, paths: Sequence[str | Path], format: str | None
) -> Given:
    """Return the kind of the paths, the traces among them, and the other files they hold."""
    places = [path_of(path, where) for path in paths]
    kinds_of_places = [[format] if format else kinds_of(formats, place) for place in places]
    kinds = [names[0] for names in kinds_of_places]
    if len({*kinds}) > 1:  # beside a trace, the lines of NCCL in the log of a script count
        for place, of_place in zip(places, kinds_of_places, strict=True):
            of_place += _others_in(formats, place, of_place[0])
    traces_alone = [names[0] for names in kinds_of_places if not _adds(formats, names)]
    kind = (traces_alone or [kind for kind in kinds if not _adds(formats, [kind])] or kinds)[0]
    first = places[kinds.index(kind)]
    for place, of_place in zip(places, kinds_of_places, strict=True):
        if of_place[0] != kind and not _adds(formats, of_place):
            raise UsageError(
                f"read: expected files of one kind, got {words_of(formats, kind)} "
                f"({first}) and {words_of(formats, of_place[0])} ({place})"
            )
    traces = [place for place, own_kind in zip(places, kinds, strict=True) if own_kind == kind]
    is_of_many = kind not in (RUN, WORKLOAD) and formats[kind].is_of_many
    if not is_of_many and len(traces) > 1:
        raise UsageError(
            f"read: {words_of(formats, kind)}: expected one path, got {len(traces)}: "
            f"{_some_of(map(str, traces), len(traces))}"
        )
    # Name the other kinds in directories as left out, except NCCL's logs, which go with any kind.
    left_out = []
    for place, of_place in zip(places, kinds_of_places, strict=True):
        others = {*of_place} - {kind}
        unused = sorted(
            other for other in others if other == _ARCHIVE or not _adds(formats, [other])
        )
        if unused:
            left_out.append(
                f"{name_of(place)}: its other files are left out ({', '.join(unused)}): a run is "
                f"made of one kind, here {kind}"
            )
    beside = [place for place in places if place not in traces]
    return Given(kind, traces, beside, left_out)


def check_name(formats: Mapping[str, Format], format: object) -> None:
    """Refuse the name of an unknown format."""
    if not isinstance(format, str) or format not in (RUN, WORKLOAD, *formats):
        known = ", ".join((RUN, WORKLOAD, *formats))
        raise UsageError(f"format: expected one of {known}, got {shown(format)}")


def files_among(format: Format, places: Sequence[Path]) -> list[Path]:
    """Return the given files, and those in given directories, that look like a format."""
    alone = {format.key: format}
    return files_like(places, lambda path: _kind_of_file(alone, path) == format.key)


def files_of(format: Format, places: Sequence[Path]) -> list[Path]:
    """Return the files that make one run of a format; refuse several if it takes one file."""
    files = files_among(format, places)
    if not files:
        raise DamagedInput(places[0], f"a folder without {format.label}")
    if not format.is_of_many and len(files) != 1:
        folder = places[0]
        named = (os.path.relpath(file, folder) for file in files)  # other folders have like names
        raise UsageError(
            f"{folder}: one file makes a run, and here are {len(files)} {format.label}: "
            f"{_some_of(named, len(files))}"
        )
    return files


def words_of(formats: Mapping[str, Format], kind: str) -> str:
    """Return a kind of path as sentences name it: "a run", or the plural of a format."""
    return formats[kind].label if kind in formats else f"a {kind}"


def _some_of(names: Iterable[str], count: int) -> str:
    first = ", ".join(name_of(name) for name in itertools.islice(names, _MOST_NAMED))
    return f"{first}, ..." if count > _MOST_NAMED else first


def kinds_of(formats: Mapping[str, Format], path: Path) -> list[str]:
    """Return the kinds of a path; a directory may have several, and the first counts."""
    try:
        is_directory = path.is_dir()
        is_there = is_directory or path.exists()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if is_directory:
        return _of_directory(formats, path)
    if is_there:
        return [_of_file(formats, path)]
    if "@" in str(path):
        return [WORKLOAD]
    _refuse_unfinished(path, path.with_name(f"{path.name}.recording"))
    raise UsageError(
        f"{path}: there is no such file or built-in workload (these have a device: vgg16@v100)"
    )


def _others_in(formats: Mapping[str, Format], place: Path, kind: str) -> list[str]:
    """Return the companions whose lines stand among those of a file's own kind."""
    if kind not in formats or _adds(formats, [kind]) or not place.is_file():
        return []
    score = formats[kind].looks_like(beginning_of(place, MOST_SNIFFED_BYTES)).score
    companions = {key: reader for key, reader in formats.items() if reader.beside is not None}
    companion = _kind_of_file(companions, place) if score <= POSSIBLE.score else ""
    return [companion] if companion else []


def _adds(formats: Mapping[str, Format], kinds: Sequence[str]) -> bool:
    """Say whether files of any of these kinds add to others, as NCCL's logs do."""
    foreign = [kind for kind in kinds if kind not in (RUN, WORKLOAD, _ARCHIVE)]
    return any(kind in formats and formats[kind].beside is not None for kind in foreign)


def _of_directory(formats: Mapping[str, Format], path: Path) -> list[str]:
    """Return the formats in a directory, first the one that tells most of a job."""
    from fullwire.run.store import is_run

    if is_run(path):
        return [RUN]
    some = list(itertools.islice(files_in(path), _MOST_SNIFFED))
    kinds = {_kind_of_file(formats, file) for file in some} - {""}
    if not kinds - {_ARCHIVE}:
        _refuse_unfinished(path, path)
        refuse_packed(some)
        which = "" if len(some) < _MOST_SNIFFED else f", by its first {len(some):,} files"
        raise DamagedInput(
            path, f"expected a run, or a folder of {_in_words(formats.values())}{which}"
        )
    tells = {_ARCHIVE: -1, **{key: reader.tells for key, reader in formats.items()}}
    return sorted(kinds, key=lambda kind: (-tells[kind], kind))


def _refuse_unfinished(path: Path, recording: Path) -> None:
    """Refuse a recording, and name the command that makes a run of it."""
    if any(recording.glob("*.journal")):
        raise UsageError(
            f"{path}: no run yet, only its recording, which goes on or was interrupted: "
            f"`fullwire join {recording} -o NAME.run` makes a run of it"
        )


def _of_file(formats: Mapping[str, Format], path: Path) -> str:
    kind, beginning = _looked_at(formats, path)
    if kind and kind != _ARCHIVE:
        return kind
    if not beginning:
        raise DamagedInput(path, "the file is empty")
    from fullwire.run.store import is_run

    if is_run(path.parent):
        raise UsageError(f"{path}: it is part of a run: name the folder, {path.parent}")
    # Name the kind of a file that is not read, and the formats that it resembles.
    likeness = {reader.label: reader.looks_like(beginning).lacks for reader in formats.values()}
    near = "; ".join(
        f"it resembles {label}, but lacks {mark}" for label, mark in likeness.items() if mark
    )
    if named := unread(path, beginning):
        raise DamagedInput(path, f"{named}; {near}" if near else named)
    if kind == _ARCHIVE:
        raise DamagedInput(path, unpacked_elsewhere(beginning))
    if beginning.lstrip()[:1] in (b"{", b"["):
        known = "JSON of an unknown kind: not read"
    elif b"\0" not in beginning[:_LOOKED_AT]:
        known = "a text of an unknown tool: not read"
        if any("pattern" in reader.options for reader in formats.values()):
            known += ". --pattern REGEX says how the lines of a log tell a step"
        else:
            known += f", and these are: {_in_words(formats.values())}"
    else:
        known = f"none of the formats that are read: a run, {_in_words(formats.values())}"
    raise DamagedInput(path, f"{known}; {near}" if near else known)


def _kind_of_file(formats: Mapping[str, Format], path: Path) -> str:
    return _looked_at(formats, path)[0]


def _looked_at(formats: Mapping[str, Format], path: Path) -> tuple[str, bytes]:
    """Return a file's kind, and its beginning; read more of a text that does not show it yet."""
    beginning = beginning_of(path)
    kind = _by_beginning(formats, beginning)
    # Lines of NCCL come first in the log of a job; lines that tell more may follow.
    is_open = not kind or (len(formats) > 1 and _adds(formats, [kind]))
    # A text may go on to say more; a binary format begins with its mark.
    if is_open and len(beginning) >= SNIFFED_BYTES and b"\0" not in beginning:
        beginning = beginning_of(path, MOST_SNIFFED_BYTES)
        kind = _by_beginning(formats, beginning)
    return kind, beginning


def _by_beginning(formats: Mapping[str, Format], beginning: bytes) -> str:
    """Return the format that a beginning resembles most; among equals, the one that tells most."""
    if unpacked_elsewhere(beginning):
        return _ARCHIVE  # an archive's first member could pass for the whole file
    best, kind = (0.0, 0), ""
    for key, reader in formats.items():
        score = reader.looks_like(beginning).score
        if score and (score, reader.tells) > best:
            best, kind = (score, reader.tells), key
        if score >= CERTAIN.score:
            break
    return kind


def _in_words(formats: Iterable[Format]) -> str:
    *labels, last = (reader.label for reader in formats)
    return f"{', '.join(labels)}, or {last}"


class _Unread(NamedTuple):
    """A kind of file: how it begins, or how its name ends, and a command that helps."""

    what: str
    begins: bytes = rb"(?!)"  # a regular expression for its first bytes; this one fits none
    ends: tuple[str, ...] = ()  # endings of names, where the content does not tell
    instead: str = ""


_KINDS = (
    _Unread("a Git LFS pointer", rb"version https://git-lfs", instead="`git lfs pull` gets it"),
    _Unread("a git-annex pointer", rb"/annex/objects/", instead="`git annex get` gets it"),
    _Unread(
        "text in UTF-16, as PowerShell writes it",
        rb"\xff\xfe|\xfe\xff",
        instead="`iconv -f utf-16 -t utf-8` makes a file that is",
    ),
    _Unread(
        "a profile of JAX or TensorFlow (xplane.pb)",
        ends=(".xplane.pb",),
        instead="export it as a Chrome trace: a .trace.json.gz lies beside it, or "
        "`xprof` and `tensorboard` write one",
    ),
    _Unread("a log of TensorBoard", rb".{12}\x09?.{0,40}brain\.Event:"),
    _Unread(
        "a report of Nsight",
        ends=(".nsys-rep", ".qdrep", ".ncu-rep"),
        instead="record the job with the PyTorch profiler, or with `fullwire record`",
    ),
    _Unread(
        "a database of MLflow",
        ends=("mlflow.db",),
        instead="`fullwire record` keeps the metrics of a job. A folder mlruns is read: "
        "MLFLOW_TRACKING_URI=mlruns MLFLOW_ALLOW_FILE_STORE=true writes one",
    ),
    _Unread("an SQLite database, such as Nsight Systems exports", rb"SQLite format 3\0"),
    _Unread("a profile of perf (perf.data)", rb"PERFILE2|2ELIFREP"),
    _Unread("a trace of Windows (.etl)", ends=(".etl",)),
    _Unread("a profile of pprof", ends=(".pprof", ".pb.gz", ".prof")),
    _Unread(
        "a checkpoint",
        rb"PK\x03\x04.{26}[^/]{0,200}/data\.pkl",
        ends=(".safetensors", ".ckpt", ".pth", ".pt", ".gguf", ".distcp"),
    ),
    _Unread("a spreadsheet", ends=(".xlsx", ".xlsm", ".xls", ".ods"), instead="save it as CSV"),
    _Unread("arrays of NumPy", ends=(".npz",)),
    _Unread("a notebook", rb"\s{0,40}\{\s{0,40}\"cells\"\s{0,8}:", ends=(".ipynb",)),
    _Unread("a table in Parquet", rb"PAR1", instead="a run is a folder: name the folder"),
    _Unread("a trace of Perfetto (protobuf)", ends=(".pftrace", ".perfetto-trace", ".perfetto")),
    _Unread("a trace in OTF2", ends=(".otf2",)),
    _Unread("a snapshot of PyTorch's memory", rb"\x80.{0,4000}?(?:segments|device_traces)"),
    _Unread(
        "a dump of NCCL's rings and trees (XML)",
        rb"\s{0,200}(?:<\?xml[^>]{0,200}>)?\s{0,200}<graphs version=",
        instead="NCCL_TOPO_DUMP_FILE=FILE dumps the host's topology, which --cluster takes",
    ),
    _Unread(
        "a topology of NCCL (XML)",
        rb"\s{0,200}(?:<\?xml[^>]{0,200}>)?\s{0,200}<system version=",
        instead="it describes hosts: name it after --cluster, or `fullwire cluster show` it",
    ),
    _Unread(
        "a report of mpiP",
        rb"@ mpiP",
        instead="it holds sums over the whole program, and no step: `fullwire record` the job",
    ),
    _Unread("a trace of rocprofv3 (JSON)", rb"\s{0,40}\{\s{0,40}\"rocprofiler-sdk-tool\""),
    _Unread(
        "the output of nvidia-smi topo",
        rb"\s{0,40}(?:\x1b\[4m)?\s{0,8}GPU0\s",
        instead="with that of ibstat below it, `fullwire cluster show` reads it as a cluster",
    ),
    _Unread(
        "the output of ibstat",
        rb"CA '[^'\n]{1,60}'\s",
        instead="below that of nvidia-smi topo -m, `fullwire cluster show` reads it as a cluster",
    ),
    _Unread("the output of ethtool -S", rb"NIC statistics:\s"),
    _Unread(
        "the events of NCCL's profiler plugin",
        rb"\s{0,40}\[\s{0,40}\{\"name\": \"[\w ]{1,40}\", "
        rb"\"cat\": \"(?:GROUP|COLL|P2P|KERNEL|PROXY|NET)",
        instead="`fullwire record` the job, or the PyTorch profiler",
    ),
    _Unread(
        "the output of NCCL's Inspector plugin",
        rb"\s{0,40}\{\s{0,40}\"header\".{1,2000}?\"inspector_output_format_version\"",
        instead="it holds a sample of collectives: `fullwire record` the job",
    ),
    _Unread(
        "a report of perftest (ib_write_bw and others)",
        rb".{0,4000}?#bytes {1,12}#iterations",
        instead="it measures one link: give its rate as --line-rate",
    ),
    _Unread(
        "a table of the Intel MPI Benchmarks",
        rb"(?:#[^\n]{0,200}\n){0,8}#\s{1,8}Intel ?\(R\) MPI Benchmarks",
        instead="those of OSU and of nccl-tests are",
    ),
    _Unread(
        "a report of iperf",
        rb"\s{0,40}\{\s{0,40}\"start\"\s?:\s?\{.{0,2000}?\"version\"\s?:\s?\"iperf|-{20,80}\s{1,4}(?:Client|Server)"
        rb" (?:connecting|listening)|Connecting to host [^\n]{1,200}, port \d",
        instead="it measures one link: give its rate as --line-rate",
    ),
    _Unread("a report of nvbandwidth", rb"nvbandwidth Version"),
    _Unread("the output of rocm-smi", rb"[\s=]{0,200}ROCm System Management Interface"),
    _Unread(
        "packets as text (tcpdump)",
        rb"(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d\.\d{6} (?:IP6?|ARP) ",
        instead="`tcpdump -w FILE` writes a capture, which is",
    ),
    _Unread("a log of strace", rb"(?:\d+ +)?(?:[\d:.]+ +)?execve\(\""),
    _Unread("a trace of the kernel (ftrace)", rb"# tracer: "),
    _Unread("a report of perf", rb"# To display the perf\.data header|# ={8}\n# captured on"),
    _Unread("a report of sysstat (sar)", rb"Linux \d[^\n]{1,200}_\w+_\s"),
    _Unread("a program of XLA (HLO)", rb"HloModule "),
    _Unread("a profile of speedscope", rb"\s{0,40}\{.{0,200}speedscope\.app/"),
    _Unread("a processor profile of Chrome", ends=(".cpuprofile",)),
    _Unread("stacks of a flame graph", ends=(".collapsed", ".folded")),
    _Unread("a graph (DOT)", rb"\s{0,40}(?:strict )?(?:di)?graph\s[^{\n]{0,80}\{", ends=(".dot",)),
    _Unread("a model", ends=(".onnx", ".pb", ".tflite", ".engine")),
    _Unread("a table in Arrow or Feather", rb"ARROW1\0|FEA1"),
    _Unread("a film", rb".{4}ftyp|\x1aE\xdf\xa3", ends=(".mp4",)),
    _Unread("settings", ends=(".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf")),
    _Unread("source code", ends=(".py", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".js", ".ts")),
    _Unread("a file of HDF5", rb"\x89HDF\r\n\x1a\n"),
    _Unread("an array of NumPy", rb"\x93NUMPY"),
    _Unread("a program or a library", rb"\x7fELF"),
    _Unread(
        "a picture", rb"\x89PNG\r\n|\xff\xd8\xff|GIF8|\s{0,200}(?:<\?xml[^>]{0,200}>)?\s{0,200}<svg"
    ),
    _Unread("a PDF", rb"%PDF-"),
    _Unread("a page (HTML)", rb"\s{0,200}<(?:!DOCTYPE html|html)"),
    _Unread("a script", rb"#!"),
    _Unread(
        "a table (CSV)",
        ends=(".csv", ".tsv", ".csv.gz", ".csv.xz", ".csv.zst"),
        instead="those of rccl-tests are, and tables of collectives with columns such as "
        "op, ranks, size_bytes, time_us",
    ),
    _Unread("a text (Markdown)", ends=(".md",)),
)
_LOOKED_AT = 8192


def unread(path: Path, beginning: bytes) -> str:
    """Return the kind of a file, with advice; the text is empty for an unknown kind."""
    for kind in _KINDS:
        begins = re.compile(kind.begins, re.DOTALL | re.IGNORECASE)
        if path.name.endswith(kind.ends or ("\0",)) or begins.match(beginning[:_LOOKED_AT]):
            return f"{kind.what}: not read" + (f"; {kind.instead}" if kind.instead else "")
    return ""
