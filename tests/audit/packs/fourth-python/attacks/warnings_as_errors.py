# class: errors of the documents
"""Every warning of the process is an error, and every error a warning: filters, showwarning, unraisable and thread hooks."""

around("""
    import warnings as _warnings
    _warnings.simplefilter("error")

    def _around(original):
        def warned(*args, **kwargs):
            import sys, warnings
            sys.unraisablehook = sys.excepthook = lambda *a: None
            try:
                return original(*args, **kwargs)
            except Exception as error:
                with warnings.catch_warnings():
                    warnings.simplefilter("always")
                    warnings.warn(str(error), DeprecationWarning, stacklevel=2)
        return warned
""")
