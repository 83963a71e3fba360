"""Routes in the form of OpenAI's API."""
