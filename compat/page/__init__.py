"""What the page of `sparkis ui` is tested on and shown with: a log that changes all the time, and its screenshots."""
