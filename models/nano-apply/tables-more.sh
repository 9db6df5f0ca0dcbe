#!/bin/sh
# The tables of the second round. Run it in the repository, with the folder that holds the sources as its argument:
# wheels and sdists of pip, packages of npm and Debian's golang-*-dev, each unpacked below its NAME-VERSION, and a clone
# of this repository called etude.
cd "$1" && exec etude tasks fast-apply \
    async-2.4.1..async-2.5.0..async-2.6.4..async-3.0.1..async-3.1.1..async-3.2.6 \
    commander-9.5.0..commander-10.0.1..commander-11.0.0..commander-11.1.0..commander-12.0.0..commander-12.1.0 \
    express-4.16.4..express-4.17.3..express-4.18.3..express-4.19.2..express-4.20.0..express-4.21.2 \
    axios-1.2.6..axios-1.3.6..axios-1.4.0..axios-1.5.1..axios-1.6.8..axios-1.7.9 \
    fastify-4.23.2..fastify-4.24.3..fastify-4.25.2..fastify-4.26.2..fastify-4.27.0..fastify-4.28.1 \
    immer-6.0.9..immer-7.0.15..immer-8.0.4..immer-9.0.21..immer-10.0.4..immer-10.1.1 \
    ws-8.13.0..ws-8.14.2..ws-8.15.1..ws-8.16.0..ws-8.17.1..ws-8.18.0 \
    ramda-0.27.2..ramda-0.28.0..ramda-0.29.1..ramda-0.30.1..ramda-0.31.3..ramda-0.32.0 \
    koa-2.15.4..koa-2.16.4..koa-3.0.3..koa-3.1.2..koa-3.2.1..koa-3.3.0 \
    rxjs-7.3.1..rxjs-7.4.0..rxjs-7.5.7..rxjs-7.6.0..rxjs-7.7.0..rxjs-7.8.1 \
    zod-4.1.13..zod-4.2.1..zod-4.3.6..zod-4.4.3..zod-4.5.4..zod-4.6.7 \
    arrow-0.17.0..arrow-1.0.3..arrow-1.1.1..arrow-1.2.3..arrow-1.3.0..arrow-1.4.0 \
    attrs-24.3.0..attrs-25.1.0..attrs-25.2.0..attrs-25.3.0..attrs-25.4.0..attrs-26.1.0 \
    bottle-0.12.25..bottle-0.13.4 \
    beautifulsoup4-4.10.0..beautifulsoup4-4.11.2..beautifulsoup4-4.12.3..beautifulsoup4-4.13.5..beautifulsoup4-4.14.3..beautifulsoup4-4.15.0 \
    cachetools-7.1.8..cachetools-7.2.8..cachetools-7.3.2..cachetools-8.0.0 \
    click-8.2.1..click-8.3.3..click-8.4.2..click-8.5.1 \
    deepdiff-8.5.0..deepdiff-8.6.2..deepdiff-9.0.0..deepdiff-9.1.0 \
    falcon-4.1.0..falcon-4.2.0..falcon-4.3.1..falcon-4.4.0 \
    flask-2.2.5..flask-2.3.3..flask-3.0.3..flask-3.1.3 \
    glom-23.4.0..glom-23.5.0..glom-24.11.0..glom-25.12.0 \
    jinja2-2.10.3..jinja2-2.11.3..jinja2-3.0.3..jinja2-3.1.6 \
    lark-1.0.0..lark-1.1.9..lark-1.2.2..lark-1.3.1 \
    marshmallow-4.1.2..marshmallow-4.2.4..marshmallow-4.3.1..marshmallow-4.4.0 \
    mistune-3.1.4..mistune-3.2.1..mistune-3.3.4..mistune-3.4.0 \
    requests-2.31.0..requests-2.32.5..requests-2.33.1..requests-2.34.2 \
    rich-14.1.0..rich-14.2.0..rich-14.3.4..rich-15.0.0 \
    sqlparse-0.3.1..sqlparse-0.4.4..sqlparse-0.5.5..sqlparse-0.6.1 \
    starlette-1.7.0..starlette-1.8.0..starlette-1.9.0..starlette-1.10.0 \
    tinydb-4.6.1..tinydb-4.7.1..tinydb-4.8.2..tinydb-4.9.0 \
    werkzeug-2.2.3..werkzeug-2.3.8..werkzeug-3.0.6..werkzeug-3.1.9 \
    wtforms-3.0.1..wtforms-3.1.2..wtforms-3.2.2..wtforms-3.3.2 \
    networkx-3.3..networkx-3.4.2..networkx-3.5..networkx-3.6.1 \
    pygments-2.21.0 \
    psutil-5.9.8..psutil-6.0.0..psutil-6.1.1 \
    JPype1-1.4.1..jpype1-1.5.2 \
    spf13-cobra-1.6.1-1 \
    spf13-pflag-1.0.6 \
    stretchr-testify-1.8.1-1 \
    gin-gonic-gin-1.8.1-1 \
    go-chi-chi-5.0.7-1 \
    labstack-echo-4.2.1-3 \
    miekg-dns-1.1.50-2 \
    pelletier-go-toml-1.9.4-1 \
    urfave-cli-2.3.0-2 \
    uber-zap-1.23.0-1 \
    etude \
    --held-out \
    bitarray-3.12.3 \
    underscore-1.12.1..underscore-1.13.7 \
    redux-4.2.1..redux-5.0.1 \
    boltons-26.1.0..boltons-26.2.0 \
    funcy-2.0..funcy-2.1 \
    more-itertools-11.1.0..more-itertools-11.2.1 \
    pydash-8.0.6..pydash-8.1.0 \
    toolz-1.1.0..toolz-1.2.0 \
    sirupsen-logrus-1.9.0-1 \
    -o "$OLDPWD/outputs/edits" --seed 1 --max-lines 20 --per-path 8 --per-repository 350 --synthetic 4
