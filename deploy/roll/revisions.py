"""The revisions of a cluster: the settings and the model of its workers, by number; 0 is what `baton up` started."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace

from deploy.plan.cluster_plan import ClusterPlan
from deploy.plan.config import ClusterConfig
from deploy.plan.model import ModelFacts
from deploy.processes.atomic_file import AtomicFile
from deploy.roll.roll import Roll
from wire.errors import ConfigError, Unavailable
from wire.served_model import ServedModel
from wire.typed_reader import from_json, shown, to_json

FILE = "revisions.json"
ROLLED = frozenset(("worker", "batch", "speculation", "model"))
"""The tables of settings that workers alone have, and the model's, of which `_require_alike` decides."""
OF_ROUTERS = frozenset(
    f"model.{name}"
    for name in ("served_name", "generation_config", "max_chat_tokens", "tool_format", "reasoning_format")
)
"""The model's settings by which routers go, which are not rolled."""
_OF_VERSIONS = frozenset(("folder", "dtype", "fingerprint_hex", "layout_hex", "sampling"))
"""The parts of the served model in which the versions that a router knows at once may differ."""
_OF_ROUTERS_LAYOUT = ("block_size", "window", "num_sinks")
"""The parts of the KV layout by which a router goes; it has one prompt index for all versions."""
_SETTINGS = {
    "text_hex": "tokenizer or chat template (model.path)",
    "block_size": "block size of KV (model.block_size)",
    "window": "attention window (model.path, model.kv_policy)",
    "num_sinks": "attention sinks (model.path, model.kv_policy)",
    "kv_policies": "KV policies (model.kv_policy, model.allowed_kv_policies)",
    "max_context_len": "context",
    "vocab_size": "vocabulary size (model.path)",
    "batch_invariant": "batch invariance (model.path, model.exact, speculation.proposer)",
}
"""The settings that determine a part of the served model."""


@dataclass(frozen=True, kw_only=True)
class Revision:
    """The settings and the model by which workers of one revision start."""

    config: ClusterConfig
    model: ModelFacts
    number: int = 0


@dataclass(frozen=True)
class _Revisions:
    """The record: the revisions that workers have or may go back to, the oldest first."""

    revisions: tuple[Revision, ...]


def read_revisions(file: AtomicFile) -> tuple[Revision, ...]:
    """Returns the recorded revisions, the oldest first; none without a file, or for a damaged one."""
    known = file.recall(lambda text: from_json(_Revisions, text, "revisions"))
    return () if known is None else known.revisions


class Revisions:
    """The plans of the revisions that workers have, and their record for the next controller and `baton roll`."""

    def __init__(self, plan: ClusterPlan, file: AtomicFile) -> None:
        """plan: made by `baton up`. Without a record, or with a damaged one, every revision has its settings."""
        self._plan = plan
        self._file = file
        self._revisions = {one.number: one for one in read_revisions(file)}
        if not self._revisions:
            self._revisions[0] = Revision(config=plan.config, model=plan.model)
            self._write()

    def __getitem__(self, number: int) -> Revision:
        """Returns a revision; of an unknown number, the settings of `baton up`."""
        plan = self._plan
        return self._revisions.get(number) or Revision(config=plan.config, model=plan.model, number=number)

    def plan_of(self, number: int) -> ClusterPlan:
        """Returns the plan by which workers of a revision start."""
        return self.plan_by(self[number])

    def plan_by(self, revision: Revision) -> ClusterPlan:
        """Returns the plan by which workers of a revision would start, which need not be recorded."""
        return replace(self._plan, config=revision.config, model=revision.model)

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """The versions of the model that workers have or may have."""
        return tuple({one.model.served.namespace: one.model.served for one in self._revisions.values()}.values())

    @property
    def recovered(self) -> Roll:
        """The roll of workers whose revisions are not known: to the oldest revision, which certainly has served."""
        return Roll(wanted=min(self._revisions), last=max(self._revisions))

    def add(self, revision: Revision) -> None:
        """Records a revision, before any worker has it. Raises Unavailable if it cannot be written."""
        self._revisions[revision.number] = revision
        if not self._write():
            del self._revisions[revision.number]
            raise Unavailable(f"{self._file.path} cannot be written: nothing is rolled")

    def keep(self, numbers: Collection[int]) -> None:
        """Forgets all revisions but these."""
        if gone := self._revisions.keys() - set(numbers):
            self._revisions = {number: one for number, one in self._revisions.items() if number not in gone}
            self._write()

    def _write(self) -> bool:
        known = tuple(self._revisions[number] for number in sorted(self._revisions))
        return self._file.try_write(to_json(_Revisions(known)).encode())


def rolled(present: Revision, config: ClusterConfig, model: ModelFacts) -> Revision:
    """Returns the revision that workers may be rolled to from the present one; the model keeps its names.

    Raises ConfigError, with the setting's name, for a change that takes effect at the start of a cluster only.
    """
    before = _settings(present.config)
    for name, value in _settings(config).items():
        table = name.partition(".")[0]
        if value != before[name] and (table not in ROLLED or name in OF_ROUTERS):
            way = "`baton scale` changes it" if table == "pools" else "`baton down` and `baton up` do"
            raise ConfigError(f"{name}: a roll does not change it: {way}")
    was = present.model.served
    text_hex = model.served.text_hex or was.text_hex
    model = replace(model, served=replace(model.served, name=was.name, aliases=was.aliases, text_hex=text_hex))
    _require_alike(replace(was, text_hex=was.text_hex or text_hex), model.served)
    return Revision(config=config, model=model)


def _require_alike(was: ServedModel, now: ServedModel) -> None:
    """Raises ConfigError for a model that a router could not serve beside the present one."""
    changed = [one.name for one in fields(was) if getattr(was, one.name) != getattr(now, one.name)]
    changed += [name for name in _OF_ROUTERS_LAYOUT if getattr(was.layout, name) != getattr(now.layout, name)]
    if told := " and ".join(_SETTINGS.get(name, name) for name in changed if name not in _OF_VERSIONS):
        raise ConfigError(f"a roll does not change the model's {told}: `baton down` and `baton up` do")


def changes(was: Revision, now: Revision) -> str:
    """Lists the settings that differ, as in `worker.num_threads 2`."""
    before = _settings(was.config)
    told = [f"{name} {shown(value)}" for name, value in _settings(now.config).items() if value != before[name]]
    return ", ".join(told) or "the same settings"


def _settings(config: ClusterConfig) -> dict[str, object]:
    """Returns each setting by its name, as in `worker.num_threads`."""
    tables = asdict(config)
    flat = {name: value for name, value in tables.items() if not isinstance(value, dict)}
    return flat | {
        f"{table}.{name}": one
        for table, value in tables.items()
        if isinstance(value, dict)
        for name, one in value.items()
    }
