"""Operators in C++, built at installation where there is a compiler; torch does their work elsewhere."""
