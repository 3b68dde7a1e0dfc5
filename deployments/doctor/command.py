"""`lora-fleet doctor`: the command line, and what it prints."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from deployments.doctor.finding import Finding, Verdict, fault, ok
from deployments.fleet_commands import Exit, Json, dumped, stdout
from deployments.local_cluster import ENVIRONMENT
from lora_core.errors import ConfigError

if TYPE_CHECKING:
    from deployments.doctor.memory import MemoryReport
    from deployments.serve_config import ServeConfig

STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAULT: "bold red"}

doctor_commands = typer.Typer()


@doctor_commands.command()
def doctor(
    config: Annotated[Path, typer.Argument(help="Configuration, as for `up`.")] = Path("cluster/config.yaml"),
    gpu_gib: Annotated[
        float | None, typer.Option(min=0.1, help="Plan for a GPU with so many GiB free, which need not be here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Look at this machine and a configuration: versions, devices, compilers, network, keys, and the memory plan.

    Starts nothing, and loads no model. Ends with status 1 if something is at fault, and with 0 where all is well.
    """
    os.environ.update(ENVIRONMENT)
    findings = list(_machine())
    read, found = _configuration(config)
    findings += found
    findings += _network(read)
    report = None
    if read is not None:
        # Imported late: it takes torch.
        from deployments.doctor.memory import memory_report

        found, report = memory_report(read, gpu_gib)
        findings += found
    is_well = all(finding.verdict is not Verdict.FAULT for finding in findings)
    if as_json:
        typer.echo(dumped({"ok": is_well, "findings": findings, "memory": report}))
    else:
        _show(findings, report)
    if not is_well:
        raise typer.Exit(Exit.REFUSED)


def _machine() -> Iterator[Finding]:
    """What does not depend on a configuration. Where a package is missing or broken, others are still looked at."""
    from deployments.doctor.versions import version_findings

    yield from version_findings()
    yield from _guarded("devices", _devices)
    yield from _guarded("machine", _system)


def _devices() -> Iterable[Finding]:
    from deployments.doctor.devices import device_findings

    return device_findings()


def _system() -> Iterable[Finding]:
    from deployments.doctor.machine import machine_findings

    return machine_findings()


def _guarded(subject: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What a look finds, or that a package it needs cannot be imported: that is what a doctor is called for."""
    try:
        yield from look()
    except ImportError as error:
        yield fault(subject, f"cannot be looked at: {error}", "install this project again (make setup)")


def _configuration(path: Path) -> "tuple[ServeConfig | None, list[Finding]]":
    try:
        # Ray reads its environment when it is imported.
        from deployments.serve_config import has_keys, read_serve_config

        config = read_serve_config(path, os.environ)
        keys = "with keys" if has_keys(config.settings, os.environ) else "without keys, for this machine alone"
        return config, [ok("configuration", f"{path}: {config.settings.base_name} at {config.address}, {keys}")]
    except ConfigError as error:
        return None, [fault("configuration", str(error), "docs/configuration.md has every key")]
    except ImportError as error:
        return None, [fault("configuration", f"cannot be read: {error}", "install this project again (make setup)")]


def _network(config: "ServeConfig | None") -> list[Finding]:
    def look() -> Iterable[Finding]:
        from deployments.doctor.network import network_findings

        return network_findings(config)

    return list(_guarded("network", look))


def _show(findings: Iterable[Finding], report: "MemoryReport | None") -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        told = Text(finding.found)
        if finding.remedy:
            told.append(f"\n{finding.remedy}", style="italic")
        table.add_row(Text(finding.verdict.value, style=STYLES[finding.verdict]), finding.subject, told)
    stdout().print(table)
    if report is not None:
        typer.echo()
        for line in report.lines:
            typer.echo(line)
