"""Every setting, once: a row of a section, and the frozen `Config` they make.

Rules: a setting is one `_row` below and nothing else; its dotted name is `section.field`, its environment variable
`HEADRACE_SECTION_FIELD`. `config` reads and checks them; nobody else makes one but from a `Config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from headrace.gateway.spec import AliasSpec, EngineSpec

Value = bool | int | float | str
T = TypeVar("T", bound=Value)

PREFIX = "HEADRACE_"
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Setting:
    """A row. The default's type is the setting's type."""

    name: str
    """Dotted: `server.port`."""
    default: Value
    unit: str
    """"" where there is none."""
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    secret: bool = False
    """Its value appears in no message."""

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.name.replace(".", "_").upper()

    @property
    def bounds(self) -> str:
        """What it may be, in words; "" where anything of its type will do."""
        if self.choices:
            return ", ".join(self.choices)
        if isinstance(self.default, bool):
            return "true, false"
        return "" if self.low is None or self.high is None else f"{self.low:.12g} to {self.high:.12g}"


def _row(
    default: T,
    unit: str,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    secret: bool = False,
) -> T:
    """A dataclass field that carries its row. Typed as its value, so that sections are checked like any dataclass."""
    row = Setting("", default, unit, help, low, high, choices, secret)
    return field(default=default, repr=not secret, metadata={"row": row})


# fmt: off
@dataclass(frozen=True, slots=True)
class Server:
    """The HTTP side."""

    host: str = _row("127.0.0.1", "", help=
        "Address to listen on. One that other machines can reach needs a key, `server.key` or another, or "
        "`server.insecure`.")
    port: int = _row(8000, "", low=0, high=65535, help="Port to listen on; 0 takes a free one.")
    key: str = _row("", "", secret=True, help=
        "API key that clients must send as a bearer token; empty asks for none. "
        "Rather set its environment variable than a flag: other users can read a command line.")
    admin_key: str = _row("", "", secret=True, help=
        "Key of the admin API, which no client key opens. Without it that API answers only on a loopback address, and "
        "on the main one only while no client needs a key.")
    admin_host: str = _row("", "", help=
        "Address of its own for the admin API, health and metrics; empty takes `server.host`. It needs "
        "`server.admin_port`.")
    admin_port: int = _row(0, "", low=0, high=65535, help=
        "Port of its own for the admin API; 0 serves it on the main address.")
    insecure: bool = _row(False, "", help="Allow a non-loopback address without a key.")
    cors_origins: str = _row("", "", help=
        "Origins whose web pages may call the API from a browser, comma-separated, as `https://chat.example.org`; "
        "`*` allows all. Empty allows none but our own page.")
    body_limit_bytes: int = _row(10 * MIB, "bytes", low=1024, high=1024 * MIB, help=
        "Largest request body; a larger one is answered with 413.")
    head_timeout_s: float = _row(30.0, "s", low=0.1, high=3600, help=
        "How long a request's line and headers may take to arrive; a body must bring at least 1 KiB in that time.")
    header_hold_s: float = _row(1.0, "s", low=0, high=60, help=
        "How long a stream's headers wait for the first text, so that they carry its timing and an honest status.")
    heartbeat_s: float = _row(15.0, "s", low=0.1, high=3600, help=
        "A stream that is silent for this long gets a comment line, so that proxies keep it open.")
    write_timeout_s: float = _row(60.0, "s", low=0.1, high=3600, help=
        "A reader that takes nothing for this long is disconnected.")
    drain_s: float = _row(30.0, "s", low=0, high=3600, help=
        "How long running answers may take to finish after SIGTERM or Ctrl-C.")
    slice_us: int = _row(500, "µs", low=0, high=100_000, help=
        "Time slice to ask the kernel for (Linux 6.12 or later): the shorter, the sooner the server runs when a token "
        "is there, at the same share of the CPU. 0 asks for none; from 100 up it is granted.")
    max_pending_events: int = _row(256, "events", low=2, high=65536, help=
        "Events kept for one slow reader before its sequence is paused.")


@dataclass(frozen=True, slots=True)
class Model:
    """What is served."""

    path: str = _row("smollm2-135m", "", help=
        "A name that `headrace pull` knows, `hf:ORG/REPO/FILE.gguf`, or the path of a GGUF file. `scripted:RATE` "
        "computes nothing and writes numbers at so many tokens per second: for testing what stands before the server.")
    alias: str = _row("", "", help="The name clients use; empty derives it from `model.path`.")
    tuned: bool = _row(True, "", help=
        "Use what `headrace tune` or the first start found for this file on this machine: weights and settings of the "
        "engine, below those that you set yourself. Off: nothing is measured either.")
    own_sampling: bool = _row(True, "", help=
        "Where a request says nothing of `temperature`, `top_p`, `top_k`, `min_p` or `repetition_penalty`, the model's "
        "own values hold: those in its file, else those that its makers published, as far as the catalogue knows them. "
        "Off: OpenAI's (1, 1, off, 0, 1).")
    measure: bool = _row(True, "", help=
        "A file that is served here for the first time is measured for up to 20 s before the server is ready: which "
        "kernels, attention, threads and number format are fastest on this machine. Off, or `headrace serve "
        "--no-measure`: not.")


@dataclass(frozen=True, slots=True)
class Engine:
    """The embedded engine: memory and scheduling."""

    in_process: bool = _row(False, "", help=
        "Run the engine inside the server process instead of a child, for tests and embedding: "
        "if the engine crashes, the server goes with it, and no plainer kernels can be tried if it does so while it "
        "loads.")
    threads: int = _row(0, "threads", low=0, high=1024, help="Threads for a step of one token; 0 takes all cores.")
    threads_batch: int = _row(0, "threads", low=0, high=1024, help="Threads for larger steps; 0 takes all cores.")
    spin: int = _row(20000, "turns", low=0, high=10**9, help=
        "How long a compute thread waits busily for the others before it sleeps (GOMP_SPINCOUNT of the engine, "
        "unless the environment sets that). The library's own 300000 lets a step that shares its cores with anything "
        "else take many times as long. 0 leaves it to the library.")
    cells: int = _row(16384, "tokens", low=256, high=2**24, help=
        "KV cells in the pool that all sequences share, one a token.")
    context: int = _row(0, "tokens", low=0, high=2**24, help=
        "Most tokens of one sequence, prompt and answer together; 0 takes the model's limit, or all cells if fewer.")
    max_batch: int = _row(8, "sequences", low=1, high=256, help=
        "Sequences that are computed at the same time; more (`optimizations.efficient_steps`) as long as a step of "
        "their next tokens takes no longer than half of `slo.itl_ms`. A request that has waited longer than "
        "`slo.ttft_fuse_ms` joins beyond it.")
    max_running: int = _row(16, "sequences", low=1, high=256, help=
        "Sequences that are computed at the same time at the very most; more wait in the queue.")
    slots: int = _row(64, "sequences", low=1, high=256, help=
        "KV sequence ids, for running sequences and for finished ones kept for reuse.")
    step_tokens: int = _row(512, "tokens", low=16, high=8192, help=
        "Most prompt tokens in a step when their number is chosen by `optimizations.adaptive_chunks`.")
    prefill_chunk: int = _row(2048, "tokens", low=0, high=65536, help=
        "Prompt tokens a step without `optimizations.adaptive_chunks`; 0 computes whole prompts at once.")
    idle_cells: int = _row(1536, "tokens", low=0, high=2**24, help=
        "KV cells that finished sequences may keep for reuse; they give way when a running one needs them. Every step "
        "pays for the width of the pool: 4096 made short prompts 20 % slower on two cores.")
    kv_type: str = _row("f16", "", choices=("f16", "bf16", "q8_0"), help=
        "Type of the KV cache. `q8_0` takes half the memory, is slower on a CPU and needs `engine.flash_attention`; "
        "`bf16` needs that off: with it a CPU would compute such a cache row by row.")
    extra_buffers: bool = _row(True, "", help=
        "Lay weights out anew for this CPU's kernels (AMX, repacked) when the model is loaded. Off: as they stand in "
        "the file, which is slower and avoids those kernels.")
    check_memory: bool = _row(True, "", help=
        "Refuse to start if the model, `engine.cells` and a step need more memory than this machine, or the container, "
        "has. Off, or `headrace serve --anyway`: try.")
    flash_attention: bool = _row(True, "", help=
        "Flash attention. Without it a step costs more the more cells other sequences hold.")
    prefix_cache: bool = _row(True, "", help="Reuse the KV of prompts with the same beginning.")
    max_waiting: int = _row(256, "requests", low=0, high=65536, help=
        "Requests that may wait for a place; one more is answered with 503.")
    max_waiting_tokens: int = _row(262144, "tokens", low=0, high=2**31, help=
        "Prompt tokens that may wait for a place; a request beyond is answered with 503.")
    queue_timeout_s: float = _row(30.0, "s", low=0.1, high=3600, help=
        "A request that waited this long for a place is answered with 503; so is, at once, one that would have to.")
    step_timeout_s: float = _row(60.0, "s", low=0.1, high=3600, help=
        "An engine that gives no sign for this long while it has work is killed and started again.")
    draft_model: str = _row("", "", help=
        "A second, smaller GGUF with the same vocabulary that drafts tokens for `optimizations.speculation`; empty "
        "drafts from the text itself.")


@dataclass(frozen=True, slots=True)
class Slo:
    """What people shall have to wait, at most."""

    profile: str = _row("chat", "", choices=("voice", "chat-strict", "chat", "reading"), help=
        "Targets by kind of use; the rows below replace single ones.")
    ttft_ms: float = _row(0.0, "ms", low=0, high=600_000, help=
        "Time to the first token that the order of requests aims at; 0 takes the profile's.")
    itl_ms: float = _row(0.0, "ms", low=0, high=60_000, help=
        "Length of a step while somebody reads; 0 takes the profile's.")
    itl_hard_ms: float = _row(0.0, "ms", low=0, high=60_000, help=
        "Length of a step while somebody reads and somebody else has waited `slo.ttft_fuse_ms` for the first token; 0 "
        "takes the profile's.")
    ttft_fuse_ms: float = _row(100.0, "ms", low=0, high=60_000, help=
        "How long a request may wait for its first token before steps get longer for it and the batch wider.")
    arrival_guard_ms: float = _row(250.0, "ms", low=1, high=60_000, help=
        "Length of a step while nobody reads: a newcomer waits for the end of the running step.")


@dataclass(frozen=True, slots=True)
class Optimizations:
    """What can be turned off, to compare."""

    adaptive_chunks: bool = _row(True, "", help=
        "Make each step as long as `slo` allows, by a cost model that learns from the steps; off: "
        "`engine.prefill_chunk`.")
    efficient_steps: bool = _row(True, "", help=
        "A step beside readers may pass `slo.itl_ms` where that at least doubles the prompt tokens per second, as at "
        "the 64 rows from which attention is computed in tiles; never `slo.itl_hard_ms` by more than 15 %.")
    split_steps: bool = _row(True, "", help=
        "Compute readers and prompts of a step one after the other where that is faster: in one tile of attention "
        "every row looks at what each reader has read.")
    padded_steps: bool = _row(True, "", help=
        "Fill a step up with rows that nobody reads, to the 64 of a tile of attention or to the 16 that some kernels "
        "take at a time, where that saves more than they cost.")
    earliest_deadline: bool = _row(True, "", help=
        "Compute prompts in the order in which they are due, short ones sooner; off: first come, first served.")
    ttft_fuse: bool = _row(True, "", help="Longer steps and a wider batch for who has waited `slo.ttft_fuse_ms`.")
    await_prefix: bool = _row(True, "", help=
        "A prompt whose beginning is being computed for another waits for it instead of computing it again.")
    admission: bool = _row(True, "", help="Refuse at arrival what cannot meet its deadline.")
    mined_templates: bool = _row(True, "", help="Pin the prefixes that save most, found in the traffic.")
    tiers: bool = _row(True, "", help="Keep the KV of idle conversations outside the pool, see `tiers`.")
    replay: bool = _row(True, "", help="Go on with live streams when the engine had to be started again.")
    speculation: bool = _row(True, "", help="Guess tokens ahead and check them in one step; the text stays the same.")
    overlap: bool = _row(False, "", help=
        "Tell readers of a step while the next one is computed. Off: on two cores that both compute it made tokens 2 % "
        "slower.")


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where KV goes that leaves the pool."""

    ram_mib: int = _row(2048, "MiB", low=0, high=2**20, help="Memory for it; 0 for none.")
    ssd_mib: int = _row(4096, "MiB", low=0, high=2**26, help="Disk for it; 0 for none. It is there after a restart.")
    ssd_path: str = _row("", "", help="Directory on the disk; empty takes one beside the models.")
    redis_url: str = _row("", "", secret=True, help=
        "A Redis or Valkey that servers share it through, `redis://…`; empty for none.")
    redis_ttl_s: float = _row(3600.0, "s", low=1, high=10**8, help=
        "How long Redis keeps an entry, give or take a tenth, so that they do not all end together.")
    redis_timeout_ms: float = _row(50.0, "ms", low=1, high=60_000, help=
        "How long Redis may take to answer before it is left alone for a while.")
    min_tokens: int = _row(64, "tokens", low=1, high=10**6, help="Shorter prefixes are computed again.")


@dataclass(frozen=True, slots=True)
class Templates:
    """Prompts that are kept warm."""

    file: str = _row("", "", help=
        "TOML file of prompt templates whose beginnings are kept warm; empty takes "
        "`$XDG_CONFIG_HOME/headrace/templates.toml` if it is there.")
    budget: int = _row(100, "prefixes", low=0, high=100_000, help=
        "Prefixes that `optimizations.mined_templates` may pin.")
    look_s: float = _row(20.0, "s", low=0.1, high=3600, help=
        "How often `optimizations.mined_templates` looks for them, while there is nothing else to do.")


@dataclass(frozen=True, slots=True)
class Shared:
    """What servers behind one load balancer have in common: limits, keys, streams."""

    redis_url: str = _row("", "", secret=True, help=
        "A Redis or Valkey for it, `redis://…`; empty keeps it in this process.")
    redis_timeout_ms: float = _row(50.0, "ms", low=1, high=60_000, help=
        "How long it may take to answer before it is left alone for a while.")


@dataclass(frozen=True, slots=True)
class Streams:
    """Streams that can be taken up again, see [resuming](../guides/resuming.md)."""

    grace_s: float = _row(30.0, "s", low=0, high=86_400, help=
        "How long an answer goes on that nobody reads, before it is stopped.")
    keep_s: float = _row(300.0, "s", low=0, high=86_400, help="How long a stream can be read after its end.")
    max_bytes: int = _row(4 * MIB, "bytes", low=4096, high=1024 * MIB, help=
        "Memory for one stream; its oldest events go first. A request of more bytes cannot be gone on with by another "
        "server.")
    total_bytes: int = _row(256 * MIB, "bytes", low=4096, high=2**40, help=
        "Memory for all of them; those go first that ended first.")
    lease_s: float = _row(3.0, "s", low=0.2, high=3600, help=
        "With `shared.redis_url`: a server that is not heard of for this long counts as gone, and another one goes on "
        "with its streams when they are asked for.")


@dataclass(frozen=True, slots=True)
class Keys:
    """Who may ask, and for how much."""

    store: str = _row("file", "", choices=("file", "redis"), help=
        "Where keys that `headrace keys` makes are kept, and what they used: files, or the Redis of "
        "`shared.redis_url`. With `redis` a key is always asked for; with `file` from the first key on.")
    file: str = _row("", "", help="The file of keys; empty takes `$XDG_CONFIG_HOME/headrace/keys.toml`.")
    isolate: bool = _row(True, "", help=
        "Each key, or tenant if it has one, has cached prefixes of its own. Off: all share them, and the time to the "
        "first token tells one what another has asked.")
    requests_per_minute: int = _row(0, "requests", low=0, high=100_000_000, help=
        "For keys without a limit of their own; 0 for none.")
    tokens_per_minute: int = _row(0, "tokens", low=0, high=100_000_000, help=
        "Of prompts and answers together, for keys without a limit of their own; 0 for none.")
    streams: int = _row(0, "requests", low=0, high=100_000, help=
        "Answered at the same time, streamed or not, for keys without a limit of their own; 0 for no limit.")
    usage_path: str = _row("", "", help=
        "Directory for what keys used, a file a day; empty takes `$XDG_STATE_HOME/headrace/usage`.")
    usage_days: int = _row(400, "days", low=0, high=10_000, help="How long that is kept; 0 keeps nothing.")


@dataclass(frozen=True, slots=True)
class Log:
    """What is written to stderr."""

    level: str = _row("info", "", choices=("debug", "info", "warning", "error"), help=
        "Least serious level to write. Requests are logged at `info`, never with their content.")
# fmt: on


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, checked. `Config()` is the defaults."""

    server: Server = field(default_factory=Server)
    model: Model = field(default_factory=Model)
    engine: Engine = field(default_factory=Engine)
    slo: Slo = field(default_factory=Slo)
    optimizations: Optimizations = field(default_factory=Optimizations)
    tiers: Tiers = field(default_factory=Tiers)
    templates: Templates = field(default_factory=Templates)
    shared: Shared = field(default_factory=Shared)
    streams: Streams = field(default_factory=Streams)
    keys: Keys = field(default_factory=Keys)
    log: Log = field(default_factory=Log)
    engines: tuple[EngineSpec, ...] = ()
    """The tables `[engines.NAME]`. None: one engine of ours that serves `model`."""
    aliases: tuple[AliasSpec, ...] = ()
    """The tables `[aliases.NAME]`."""


SECTIONS: Mapping[str, type[Any]] = {
    "server": Server,
    "model": Model,
    "engine": Engine,
    "slo": Slo,
    "optimizations": Optimizations,
    "tiers": Tiers,
    "templates": Templates,
    "shared": Shared,
    "streams": Streams,
    "keys": Keys,
    "log": Log,
}


def _rows() -> Iterator[Setting]:
    for section, kind in SECTIONS.items():
        for part in fields(kind):
            row: Setting = part.metadata["row"]
            yield Setting(
                f"{section}.{part.name}", row.default, row.unit, row.help, row.low, row.high, row.choices, row.secret
            )


SETTINGS: Mapping[str, Setting] = {row.name: row for row in _rows()}
"""Dotted name → row, in the order of the reference page."""
