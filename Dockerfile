# docker build --tag streamer:0.1.0 --build-arg SOURCE_COMMIT="$(git rev-parse HEAD)" .
#
# docs/guides/deploy.md has the line that runs the image. tests/image/test_image.py runs the steps
# that need no container engine.

# The digest names the image of all architectures, so a build tomorrow begins with the same files.
FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea AS python

FROM python AS build
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
# The image has no repository: hatch_build.py reads the commit from this variable.
ARG SOURCE_COMMIT=""
RUN python -m pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels .
RUN python -m venv /opt/streamer
RUN /opt/streamer/bin/python -m pip install --no-cache-dir --no-index --no-deps /wheels/*.whl
# Without headers or compiler the wheel is pure Python, which needs several times the processor time.
RUN /opt/streamer/bin/python -c "import streamer.compiled._compiled"

FROM python
# Java is 17 or 21, depending on the distribution's release: Spark runs on both.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends default-jre-headless procps tini \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/streamer streamer
COPY --from=build /opt/streamer /opt/streamer
# The classes of Spark's JVM, parsed once: Spark starts in half the time.
RUN /opt/streamer/bin/python -m streamer.copy.spark.class_archive --installed
ENV PATH=/opt/streamer/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    STREAMER_SPOOL__DIRECTORY=/var/lib/streamer/spool
USER streamer
WORKDIR /etc/streamer
VOLUME /var/lib/streamer
ARG SOURCE_COMMIT=""
LABEL org.opencontainers.image.title="streamer" \
    org.opencontainers.image.description="Streams many PostgreSQL databases into one" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.revision="$SOURCE_COMMIT" \
    org.opencontainers.image.licenses="Apache-2.0"
# The command reads config.yaml of the working directory, so it asks the address in use.
HEALTHCHECK --interval=60s --timeout=30s --start-period=60s CMD ["streamer", "health"]
# Spark's processes can outlive their parents, and pid 1 has to reap these orphans. tini passes each signal on.
ENTRYPOINT ["tini", "--", "streamer"]
CMD ["run"]
