"""`FleetExposition`: the metrics of a whole fleet on one page, made of those of its nodes."""

import re
import time
from collections.abc import Callable, Iterable, Mapping

Labels = Mapping[str, str]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

PREFIXES = {"ray_lora_fleet_": "lora_fleet_", "ray_vllm_": "vllm:"}
"""How the families of this project begin on a node's page, and how they do on the fleet's. Ray puts its own name before
each, and allows no colon."""

SAME_EVERYWHERE = ("Component", "SessionName", "Version")
"""Labels that Ray adds, and that tell nothing here."""

AS_PROMETHEUS_WRITES_THEM = {"WorkerId": "worker_id", "NodeAddress": "node_address"}
"""Other labels of Ray's."""

RUNNING, WAITING, SLOTS = "vllm:num_requests_running", "vllm:num_requests_waiting", "lora_fleet_slots"

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")


class Family:
    """All samples of one name."""

    def __init__(self) -> None:
        self.kind = "untyped"
        self.help = ""
        self.samples: list[tuple[str, Labels, str]] = []
        """Suffix of the name, labels as they are written, value."""

    def lines(self, name: str) -> Iterable[str]:
        """As Prometheus reads them."""
        yield f"# HELP {name} {self.help}"
        yield f"# TYPE {name} {self.kind}"
        for suffix, labels, value in self.samples:
            pairs = ",".join(f'{label}="{text}"' for label, text in labels.items())
            yield f"{name}{suffix}{{{pairs}}} {value}" if pairs else f"{name}{suffix} {value}"


class FleetExposition:
    """Takes one page after another, and writes them as one.

    Args:
        model_name: The base model's, which vLLM's families have as a label.
        clock: Unix time.
    """

    def __init__(self, model_name: str, clock: Callable[[], float] = time.time) -> None:
        self._model = {"model_name": escaped(model_name)}
        self._clock = clock
        self._families: dict[str, Family] = {}

    def take(self, page: str) -> None:
        """Take what is of this project on a node's page; all else is left out."""
        for line in page.split("\n"):
            if line.startswith(("# HELP ", "# TYPE ")):
                _, what, name, *rest = line.split(" ", 3)
                self._describe(name, what, rest[0] if rest else "")
            elif line.startswith("ray_"):
                self._sample(line)

    def add(self, name: str, help: str, value: float) -> None:
        """Add a gauge of the fleet's own."""
        family = self._families.setdefault(name, Family())
        family.kind, family.help = "gauge", help
        family.samples = [("", {}, f"{value:g}")]

    def text(self) -> str:
        """The page."""
        families = _with_histograms(self._families)
        requests = self._adapters_with_requests()
        if requests.samples:
            families["vllm:lora_requests_info"] = requests
        lines = [line for name in sorted(families) for line in families[name].lines(name)]
        return "".join(f"{line}\n" for line in lines)

    def _describe(self, name: str, what: str, text: str) -> None:
        own_name = _own_name(name)
        if own_name is None:
            return
        family = self._families.setdefault(own_name, Family())
        if what == "HELP":
            family.help = text
        else:
            # A sum that is counted in its own process is a gauge to Ray: see `deployments.kept_counter`.
            family.kind = "counter" if own_name.endswith("_total") else text

    def _sample(self, line: str) -> None:
        found = _SAMPLE.fullmatch(line)
        name = _own_name(found[1]) if found is not None else None
        if found is None or name is None:
            return
        labels = {
            AS_PROMETHEUS_WRITES_THEM.get(label, label): text
            for label, text in _LABEL.findall(found[2] or "")
            if label not in SAME_EVERYWHERE
        }
        if name.startswith("vllm:"):
            labels = self._model | labels
        self._families.setdefault(name, Family()).samples.append(("", labels, found[3]))

    def _adapters_with_requests(self) -> Family:
        """vLLM's `lora_requests_info`: of each replica the adapters that have requests, as labels; the time as value.

        Made here, for a scrape, since Ray would keep a series for each set of adapters that there ever was.
        """
        family = Family()
        family.kind, family.help = "gauge", "Adapters with requests; the value is the time."
        slots = {labels.get("replica", ""): value for _, labels, value in self._samples(SLOTS)}
        running, waiting = self._adapters_by_replica(RUNNING), self._adapters_by_replica(WAITING)
        for replica in sorted(running.keys() | waiting.keys()):
            labels = {
                **self._model,
                "replica": replica,
                "max_lora": f"{float(slots.get(replica, 0)):g}",
                "running_lora_adapters": ",".join(sorted(running.get(replica, ()))),
                "waiting_lora_adapters": ",".join(sorted(waiting.get(replica, ()))),
            }
            family.samples.append(("", labels, f"{self._clock():.3f}"))
        return family

    def _adapters_by_replica(self, name: str) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for _, labels, value in self._samples(name):
            adapter = labels.get("adapter", "")
            adapters = found.setdefault(labels.get("replica", ""), set())
            # The base model, and the sum of those without a label, are no adapters; no name begins like theirs.
            if float(value) and not adapter.startswith("("):
                adapters.add(adapter)
        return found

    def _samples(self, name: str) -> list[tuple[str, Labels, str]]:
        family = self._families.get(name)
        return [] if family is None else family.samples


def escaped(text: str) -> str:
    """A label's value as it is written between quotes."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _own_name(name: str) -> str | None:
    for prefix, own in PREFIXES.items():
        if name.startswith(prefix):
            return own + name[len(prefix) :]
    return None


def _with_histograms(families: Mapping[str, Family]) -> dict[str, Family]:
    """The families, each three gauges that are the parts of a histogram put together."""
    found = dict(families)
    for bucket in [name for name in families if name.endswith("_bucket")]:
        name = bucket.removesuffix("_bucket")
        whole = found[name] = Family()
        whole.kind, whole.help = "histogram", families[bucket].help
        for suffix in ("_bucket", "_sum", "_count"):
            part = found.pop(name + suffix, None)
            if part is not None:
                whole.samples += [(suffix, labels, value) for _, labels, value in part.samples]
    return found
