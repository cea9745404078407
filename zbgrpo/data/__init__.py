"""Data: what a row is and how it is read (`rows`), rendered (`chat`), ordered (`order`); and a task made here (`arithmetic`)."""
