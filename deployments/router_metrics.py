"""`RouterMetrics`: the router actor's own gauges."""

from ray.serve.metrics import Gauge

from cluster.status import FleetReport


class RouterMetrics:
    """Made inside the router actor. `docs/metrics.md` lists them."""

    def __init__(self) -> None:
        self._adapters = Gauge("lora_fleet_adapters_desired", "Adapters the fleet should serve, by state.", ("state",))
        self._copies = Gauge("lora_fleet_copies", "Slots granted to adapters that should have more than one.")
        self._replicas = Gauge("lora_fleet_replicas", "Replicas with a current lease.")
        self._stalled = Gauge("lora_fleet_replicas_stalled", "Replicas where no request gets anywhere.")
        self._epoch = Gauge("lora_fleet_epoch", "Epoch of the last change.")
        self._lag = Gauge("lora_fleet_epoch_lag", "Epochs by which the replica furthest behind is behind.")
        self._behind = Gauge("lora_fleet_replicas_behind", "Replicas that have not applied the last epoch.")

    def take(self, fleet: FleetReport) -> None:
        """Show the fleet as it is."""
        for state, count in fleet.num_adapters.items():
            self._adapters.set(count, {"state": state})
        self._copies.set(fleet.num_copies)
        lags = [fleet.epoch - replica.epoch for replica in fleet.replicas.values()]
        self._replicas.set(len(lags))
        self._stalled.set(sum(bool(replica.fault) for replica in fleet.replicas.values()))
        self._epoch.set(fleet.epoch)
        self._lag.set(max(lags, default=0))
        self._behind.set(sum(lag > 0 for lag in lags))
