{{- define "streamer.fullname" -}}
{{- if eq .Release.Name .Chart.Name -}}
{{ .Release.Name }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{- define "streamer.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "streamer.labels" -}}
{{ include "streamer.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "streamer.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* The configuration as text, from YAML or from a file. */}}
{{- define "streamer.config" -}}
{{- $config := required "config: give the configuration of streamer, for example with --set-file config=config.yaml" .Values.config -}}
{{- if kindIs "string" $config -}}{{ $config }}{{- else -}}{{ toYaml $config }}{{- end -}}
{{- end }}

{{/* A checksum of what a running process cannot apply: all settings but `sources` and `notify`. */}}
{{- define "streamer.restartChecksum" -}}
{{- $settings := include "streamer.config" . | fromYaml -}}
{{- if hasKey $settings "Error" -}}{{ fail (printf "config: not YAML: %s" $settings.Error) }}{{- end -}}
{{- if .Values.watchConfig -}}{{- $settings = omit $settings "sources" "notify" -}}{{- end -}}
{{ toYaml $settings | sha256sum }}
{{- end }}
