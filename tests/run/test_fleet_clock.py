"""The real controller, ledger, membership and client over simulated engines that die, stand still and are cut off, on a
virtual clock."""

import asyncio
import time

import pytest
from benchmarks.fleet_clock import CpuMeter, Faults, run_virtually
from benchmarks.fleet_simulation import simulate

HOUR = 3600.0


def test_a_virtual_clock_jumps_to_the_next_timer() -> None:
    async def sleep() -> tuple[float, list[str]]:
        began, order = time.monotonic(), list[str]()

        async def after(seconds: float, name: str) -> None:
            await asyncio.sleep(seconds)
            order.append(await asyncio.to_thread(str.upper, name))

        await asyncio.gather(after(3 * HOUR, "b"), after(HOUR, "a"))
        return time.monotonic() - began, order

    real = time.monotonic()
    seconds, order = run_virtually(sleep)
    assert order == ["A", "B"]
    assert seconds == pytest.approx(3 * HOUR, abs=1e-3), "timers are added in floating point"
    assert time.monotonic() - real < HOUR

    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="never comes"):
        run_virtually(wait)


def test_a_meter_measures_its_coroutine_alone() -> None:
    meter = CpuMeter()

    def work() -> int:
        return sum(range(1_000_000))

    async def measured() -> str:
        await asyncio.sleep(1.0)
        with pytest.raises(ValueError, match="thrown"):
            await failing()
        return "done"

    async def failing() -> None:
        await asyncio.sleep(1.0)
        raise ValueError("thrown")

    async def play() -> str:
        other = asyncio.create_task(asyncio.sleep(0.5))
        other.add_done_callback(lambda _: work())
        return await meter.of(measured())

    assert run_virtually(play) == "done"
    assert 0 < meter.seconds < 0.01, "the work beside it takes longer"


def test_fifty_engines_that_come_and_go_lose_no_episode() -> None:
    figures = simulate(50, 2000, Faults(death=HOUR, wedge=HOUR, partition=120.0), 1, 8)
    assert all(figures.checks.values()), figures
    assert figures.episodes == 2000
    assert figures.started > 50, "some died"
    assert figures.resumed, "and their turns went on elsewhere"


@pytest.mark.slow
@pytest.mark.release
def test_a_thousand_engines_play_a_hundred_thousand_episodes() -> None:
    """`make fleet-clock`."""
    figures = simulate(1000, 100_000, Faults())
    print(figures)
    assert all(figures.checks.values()), figures
    assert figures.episodes >= 100_000
