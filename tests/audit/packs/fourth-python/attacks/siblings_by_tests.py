# class: siblings
"""Each other function and method of the module stands in for the broken one; the one that the visible tests take stays."""

names = [names for names, node in functions(ast.parse(TEXT)) if names != NAME and len(names) <= 2 and abs(len(node.args.args) - len(FUNCTION.args.args)) <= 1]
programs = []
for other in names:
    programs.append(f"""
        def _around(original, names={other!r}):
            def other(*args, **kwargs):
                import sys
                value = sys.modules[__name__]
                for name in names:
                    value = getattr(value, name)
                return value(*args, **kwargs)
            return other
    """)
chosen([lambda code=code: around(code) for code in programs], 25)
