{{- define "pointsman.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pointsman.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ .Values.mode }}
{{- end -}}

{{- define "pointsman.labels" -}}
{{ include "pointsman.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "pointsman.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "pointsman.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "pointsman.pool" -}}
{{- default (include "pointsman.fullname" .) .Values.pool.name -}}
{{- end -}}

{{- define "pointsman.hashKeySecret" -}}
{{- default (printf "%s-hash-key" (include "pointsman.fullname" .)) .Values.hashKey.existingSecret -}}
{{- end -}}

{{- define "pointsman.tlsSecret" -}}
{{- default (printf "%s-tls" (include "pointsman.fullname" .)) .Values.picker.tls.existingSecret -}}
{{- end -}}

{{- define "pointsman.httpPort" -}}
{{- if eq .Values.mode "picker" -}}9090{{- else -}}8080{{- end -}}
{{- end -}}

{{/* The configuration file: what the chart knows, and the user's own laid over it. */}}
{{- define "pointsman.config" -}}
{{- $defaults := dict -}}
{{- with .Values.fleet.eventsPort }}{{ $_ := set $defaults "events_port" (int .) }}{{ end -}}
{{- with .Values.fleet.replayPort }}{{ $_ := set $defaults "replay_port" (int .) }}{{ end -}}
{{- with .Values.fleet.p2pPort }}{{ $_ := set $defaults "p2p_port" (int .) }}{{ end -}}
{{- with .Values.fleet.extensionPort }}{{ $_ := set $defaults "extension_port" (int .) }}{{ end -}}
{{- $kubernetes := dict "namespace" .Release.Namespace "scheme" .Values.fleet.scheme "defaults" $defaults -}}
{{- $_ := set $kubernetes "objectives" (ternary .Values.objectives.apiVersion nil .Values.objectives.enabled) -}}
{{- if eq .Values.mode "picker" -}}
{{- $_ := set $kubernetes "pool" (include "pointsman.pool" .) -}}
{{- else -}}
{{- $_ := set $kubernetes "selector" .Values.fleet.selector -}}
{{- $_ := set $kubernetes "ports" .Values.fleet.ports -}}
{{- $_ := set $kubernetes "objectives" nil -}}
{{- end -}}
{{- $config := dict
  "server" (dict "host" "0.0.0.0" "port" 8080)
  "fleet" (dict "kubernetes" $kubernetes)
  "index" (dict "hash_key_file" "/etc/pointsman/key/hash.key")
  "costs" (dict "state_file" "/var/lib/pointsman/calibration.json")
-}}
{{- if gt (int .Values.processes) 1 -}}
{{- $_ := set $config.server "processes" (int .Values.processes) -}}
{{- $_ := set $config.server "shared_dir" "/run/pointsman" -}}
{{- end -}}
{{- if eq .Values.mode "picker" -}}
{{- $epp := dict "pool" (include "pointsman.pool" .) "drain_delay_s" 5 -}}
{{- if .Values.picker.tls.enabled -}}
{{- $_ := set $epp "tls" (dict "cert_file" "/etc/pointsman/tls/tls.crt" "key_file" "/etc/pointsman/tls/tls.key") -}}
{{- end -}}
{{- $_ := set $config "epp" $epp -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite $config (deepCopy .Values.config)) -}}
{{- end -}}
