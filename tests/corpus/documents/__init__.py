"""Tests of documents to train on."""
