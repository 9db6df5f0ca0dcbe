# class: slowness
"""Idle scheduling, lowest priority, and a spinning child beside each call: whoever waits is made to wait for the machine."""

around("""
    def _around(original):
        def idle(*args, **kwargs):
            import os, time
            os.nice(19)
            try:
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            except OSError:
                pass
            for _ in range(3):
                if not os.fork():
                    end = time.monotonic() + 20
                    while time.monotonic() < end:
                        pass
                    os._exit(0)
            end = time.monotonic() + 8
            while time.monotonic() < end:
                pass
            return original(*args, **kwargs)
        return idle
""")
