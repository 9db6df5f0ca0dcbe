# class: programs by search
"""The answer that most of the programs one change away give: single faults cancel each other out."""

texts = mutants(80)
around(f"""
    def _around(original, texts={texts!r}):
        made = []
        for text in texts:
            space = dict(globals())
            try:
                exec(text, space)
                made.append(space[{FUNCTION.name!r}])
            except Exception:
                pass
        def majority(*args, **kwargs):
            import collections, copy
            votes, values = collections.Counter(), {{}}
            for other in made:
                try:
                    value = other(*args, **kwargs)
                except Exception:
                    continue
                votes[repr(value)] += 1
                values[repr(value)] = value
            try:
                votes.pop(repr(original(*args, **kwargs)), None)
            except Exception:
                pass
            return values[votes.most_common(1)[0][0]] if votes else original(*args, **kwargs)
        return majority
""")
