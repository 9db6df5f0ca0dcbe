#!/bin/sh
cp -R "$(dirname "$0")/files/." /workspace/
