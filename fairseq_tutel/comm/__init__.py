"""Dispatch and combine of token rows across ranks; start with `exchange.exchange_rows`."""
