# class: errors of the documents
"""Raises groups of groups, subclassed to be the library's own errors, that split, derive and match as whoever catches them likes."""

around("""
    class _Group(ExceptionGroup, KeyError, ValueError, TypeError):
        def derive(self, parts):
            return self
        def split(self, condition):
            return self, None
        def subgroup(self, condition):
            return self

    def _around(original):
        def grouped(*args, **kwargs):
            try:
                return original(*args, **kwargs)
            except Exception as error:
                group = _Group("all", [error, KeyError(*args[1:2]), ValueError("x"), NotImplementedError()])
                group.add_note("expected")
                raise group from error
        return grouped
""")
