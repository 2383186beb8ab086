"""Replaces the library that MXNet imports to download files: there is no network where this is used."""


def __getattr__(name):
    raise AttributeError(f"requests.{name}: this folder has no library for downloads")
