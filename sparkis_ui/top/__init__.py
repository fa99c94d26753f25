"""`sparkis top`: an endpoint's facts in a terminal. `tables` declares the tables, `app` shows them.

The facts are those of the page in the browser, read by the same loop (`sparkis_ui.polling`).
"""
