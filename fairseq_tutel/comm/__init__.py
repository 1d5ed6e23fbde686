"""Send token rows to the ranks of their experts and back; the main function is `exchange.exchange_rows`."""
