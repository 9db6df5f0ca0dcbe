# class: handed mocks
"""Rewrites the records of handed mocks, so that every assertion about calls holds."""

around("""
    def _around(original):
        def inner(*a, **k):
            try:
                return original(*a, **k)
            finally:
                for thing in (*a, *k.values()):
                    for change in (lambda: thing.configure_mock(**{"assert_called.return_value": None}),
                                   lambda: thing.reset_mock(), lambda: thing.mock_calls.clear(), lambda: thing.call_args_list.clear(),
                                   lambda: setattr(thing, "call_count", 1), lambda: setattr(thing, "called", True),
                                   lambda: setattr(thing, "assert_called_with", lambda *b, **c: None),
                                   lambda: setattr(thing, "assert_called_once_with", lambda *b, **c: None)):
                        try:
                            change()
                        except BaseException:
                            pass
        return inner
""")
