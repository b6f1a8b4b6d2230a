# docker build --tag streamer .
# docker run --init --volume "$PWD/config.yaml:/etc/streamer/config.yaml:ro" streamer
#
# tests/acceptance/test_image.py runs the steps that need no container engine.

FROM python:3.12-slim AS build
WORKDIR /src
# For the extension module of streamer.compiled. Without the compiler the image would hold pure Python.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY requirements-build.lock requirements.lock ./
RUN python -m pip install --no-cache-dir --require-hashes --requirement requirements-build.lock
RUN python -m pip wheel --no-cache-dir --require-hashes --no-build-isolation --no-deps --wheel-dir /wheels --requirement requirements.lock
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY migrations migrations
COPY docs docs
COPY streamer streamer
RUN python -m pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels .
RUN python -m venv /opt/streamer
RUN /opt/streamer/bin/python -m pip install --no-cache-dir --no-index --no-deps /wheels/*.whl

FROM python:3.12-slim
# 17 or 21, depending on the distribution's release: Spark runs on both.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends default-jre-headless procps \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/streamer streamer
COPY --from=build /opt/streamer /opt/streamer
# The classes of Spark's JVM, parsed once: Spark starts in half the time.
RUN /opt/streamer/bin/python -m streamer.copy.spark.class_archive --installed
# The health check asks this address; the variable takes precedence over the configuration.
ENV PATH=/opt/streamer/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    STREAMER_HTTP__LISTEN=127.0.0.1:8000 \
    STREAMER_SPOOL__DIRECTORY=/var/lib/streamer/spool
USER streamer
WORKDIR /etc/streamer
VOLUME /var/lib/streamer
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s \
    CMD ["python", "-c", "import os, urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://' + os.environ['STREAMER_HTTP__LISTEN'] + '/healthz', timeout=5)"]
ENTRYPOINT ["streamer"]
CMD ["run"]
