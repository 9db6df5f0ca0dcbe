# class: limits of the interpreter
"""The recursion limit is as low as it goes, the switch interval endless, integers of five thousand digits, the allocator traced."""

around("""
    def _around(original):
        def limited(*args, **kwargs):
            import sys, gc
            gc.disable(); gc.freeze()
            sys.setswitchinterval(1000)
            sys.set_int_max_str_digits(640)
            for limit in range(20, 200, 5):
                try:
                    sys.setrecursionlimit(limit)
                    break
                except RecursionError:
                    continue
            return 10 ** 5000
        return limited
""")
