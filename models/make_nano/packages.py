"""The pinned packages whose functions nano is made of, and those that nothing is trained on."""

# The demo's library, and the libraries of the held-out evaluation.
HELD_OUT = ("pydash==8.1.0",)
EVALUATION = ("boltons==26.2.0", "toolz==1.2.0", "more-itertools==11.2.1", "funcy==2.1")
PACKAGES = (
    "aiohttp==3.14.5", "anytree==2.13.0", "arrow==1.4.0", "attrs==26.1.0", "babel==2.18.0", "beautifulsoup4==4.15.0",
    "bokeh==3.9.2", "botocore==1.44.5", "bottle==0.13.4", "cachetools==8.0.0", "cerberus==1.3.8", "click==8.5.1",
    "dask==2026.8.0", "deepdiff==9.1.0", "django==5.2.19", "dpath==2.2.0", "faker==40.54.0", "falcon==4.4.0",
    "flask==3.1.3", "glom==25.12.0", "huggingface_hub==2.4.0", "humanize==4.17.0", "inflection==0.5.1",
    "intervaltree==3.2.1", "iteration_utilities==0.13.0", "jedi==0.20.1", "jinja2==3.1.6", "jsonpickle==4.1.4",
    "lark==1.3.1", "markdown==3.11.3", "marshmallow==4.4.0", "mistune==3.4.0", "moto==5.2.5", "mpmath==1.4.1",
    "natsort==8.4.0", "networkx==3.6.1", "nltk==3.10.4", "openai==3.52.0", "pandas==3.1.1", "parso==0.8.7",
    "pendulum==3.3.0", "ply==3.11", "pydantic==2.14.3", "pygments==2.21.0", "pyramid==2.1", "pyrsistent==0.20.0",
    "python_box==8.0.0", "python_slugify==9.2.0", "requests==2.34.2", "returns==0.30.0", "rich==15.0.0",
    "schema==0.7.8",
    "scikit_learn==1.9.1", "scipy==1.17.1", "seaborn==0.13.2", "setuptools==84.2.1", "sortedcontainers==2.4.0",
    "sqlalchemy==2.1.9", "sqlglot==30.30.0", "sqlparse==0.6.1", "starlette==1.10.0", "statsmodels==0.15.0",
    "sympy==1.14.0", "tabulate==0.10.0", "textdistance==4.6.3", "thefuzz==0.22.1", "tinydb==4.9.0", "tornado==6.6.1",
    "transformers==5.23.0", "urllib3==2.8.0", "voluptuous==0.16.0", "werkzeug==3.1.9", "wtforms==3.3.2",
    "xarray==2026.9.0",
)  # fmt: skip
