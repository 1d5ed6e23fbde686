"""Communication between ranks: groups, failures, exchange of rows, gradients, ZeRO and predicted times."""
