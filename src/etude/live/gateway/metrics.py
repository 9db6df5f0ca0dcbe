"""The gateway's metrics in Prometheus' text format."""

from __future__ import annotations

from etude.live.gateway.queue import RecordQueue
from etude.live.gateway.recorder import TurnRecorder
from etude.live.gateway.upstream import Clusters
from etude.live.gateway.writer import LogWriter

MEDIA_TYPE = "text/plain; version=0.0.4"


def metrics_text(queue: RecordQueue, writer: LogWriter, recorder: TurnRecorder, clusters: Clusters) -> str:
    """Counters of the queue and the log, and the state of each server."""
    counters = queue.counters
    totals = {
        "turns": counters.turns,
        "signals": counters.signals,
        "duplicates": counters.duplicates,
        "commits": writer.commits,
        "failed_commits": writer.failed_commits,
        "uncounted": counters.uncounted,
    }
    lines = [f"etude_live_{name}_total {value}" for name, value in totals.items()]
    judged = recorder.judged
    lines += [f'etude_live_followups_total{{judge="{name}"}} {n}' for name, n in sorted(judged.items())]
    lines += [f'etude_live_drops_total{{reason="{reason}"}} {n}' for reason, n in sorted(counters.drops.items())]
    lines += [f"etude_live_waiting {queue.waiting}", f"etude_live_fetches {recorder.fetches}"]
    for server in clusters.all:
        labels = f'{{cluster="{server.cluster}",url="{server.url}"}}'
        gauges = {"healthy": int(server.healthy), "version": server.version, "answers_total": server.answers}
        lines += [f"etude_live_{name}{labels} {value}" for name, value in gauges.items()]
    return "\n".join(lines) + "\n"
