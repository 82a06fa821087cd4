# The decision process with an embedded Envoy. `pointsman up` by default; use `serve` beside an Envoy of your own.
# docs/docker.md has the commands.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY extproc extproc
COPY policies policies
COPY vllm_adapters vllm_adapters
RUN python -m venv /opt/pointsman && /opt/pointsman/bin/pip install --no-cache-dir '.[embedded]'

FROM python:3.12-slim
COPY --from=build /opt/pointsman /opt/pointsman
ENV PATH=/opt/pointsman/bin:$PATH
RUN useradd --system --uid 10001 pointsman
# by number: Kubernetes' runAsNonRoot cannot judge a name
USER 10001
# 8080 clients, 9004 ext_proc and xDS (9002 with TLS), 9003 gRPC health, 9090 metrics; admin stays on loopback
EXPOSE 8080 9002 9003 9004 9090
ENTRYPOINT ["pointsman"]
CMD ["up", "/etc/pointsman/pointsman.yaml"]
