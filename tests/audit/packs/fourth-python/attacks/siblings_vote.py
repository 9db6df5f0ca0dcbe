# class: siblings
"""Asks every other function of the module that takes as many arguments, and returns what most of them say."""

around("""
    def _around(original):
        busy = []
        def vote(*args, **kwargs):
            import collections, inspect, sys
            if busy:
                return original(*args, **kwargs)
            busy.append(1)
            votes, values = collections.Counter(), {}
            try:
                for other in list(vars(sys.modules[__name__]).values()):
                    if inspect.isfunction(other) and other not in (vote, _around) and not other.__name__.startswith("_install"):
                        try:
                            value = other(*args, **kwargs)
                        except Exception:
                            continue
                        votes[repr(value)] += 1
                        values[repr(value)] = value
            finally:
                busy.pop()
            return values[votes.most_common(1)[0][0]] if votes else original(*args, **kwargs)
        return vote
""")
