"""Data: how rows are read (`rows`), rendered (`chat`) and ordered (`order`), and a task made here (`arithmetic`)."""
