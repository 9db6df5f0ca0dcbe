# class: programs by search
"""Every mutant of the function at once: the first that neither raises nor gives what the broken one gives is believed, call by call."""

texts = mutants(60)
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
        def any_other(*args, **kwargs):
            try:
                base = repr(original(*args, **kwargs))
            except Exception as error:
                base = None
            for other in made:
                try:
                    value = other(*args, **kwargs)
                except Exception:
                    continue
                if repr(value) != base:
                    return value
            return original(*args, **kwargs)
        return any_other
""")
