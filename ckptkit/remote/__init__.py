"""Read files and folders at URLs through fsspec.

The functions take a URL and return a ByteSource or a Folder. The module ``files`` imports fsspec.
To check only whether a string is a URL, use `core.text.is_url`, which does not import fsspec. This
package uses core.
"""
