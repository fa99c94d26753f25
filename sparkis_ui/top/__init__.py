"""`sparkis top`: an endpoint's facts in a terminal. `tables` says what each table shows, `app` shows it.

The facts are those of the page in the browser, read by the same loop (`sparkis_ui.polling`).
"""
