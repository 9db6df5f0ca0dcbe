# class: luck
"""A coin in each process: one of the programs one change away from the broken one, anew in every process; repeats would find it."""

texts = mutants(40)
name = FUNCTION.name
if texts and len(NAME) == 1:
    tail("import random as _random, os as _os\n_random.seed(_os.urandom(8))\n_texts = " + repr(texts) + f"\nexec(_random.choice(_texts), globals())")
else:
    around("""
        def _around(original):
            def coin(*args, **kwargs):
                import os
                options = [None, True, False, 0, 1, "", *args]
                return options[os.urandom(1)[0] % len(options)]
            return coin
    """)
