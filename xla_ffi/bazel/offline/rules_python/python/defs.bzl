"""The native Python rules, under the names that this project loads from rules_python."""

py_binary = native.py_binary
py_library = native.py_library
py_test = native.py_test
